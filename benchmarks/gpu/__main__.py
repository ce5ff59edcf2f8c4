"""python -m benchmarks.gpu --output benchmarks/results/gpu/h100.json --minutes 9

Every GPU measurement of the project on this machine's NVIDIA GPU, in this order:

    correctness  the kernels' tests and those marked `gpu`, natively; compute-sanitizer over some
    decoding     matrix products of few rows; the kernels of a captured step, its time and its floor
    kernels      attention, masked KL and confidence beside what PyTorch and others have
    training     a step of LLaDA-8B's shape at 1,024 tokens, and at 4,096 with checkpointing
    decode_step  a decoding forward of LLaDA-8B's and Dream-7B's shapes against its floor
    forward      the parts of a decoding forward of the bundled models
    compare      the bundled models beside each other, and beside vLLM with --vllm-python

What is measured is in the file after every row. The same command goes on with it: what was measured
on the same device with the same code and versions is not measured again, what failed is, at the
end. With --minutes a measurement that would not be over in time is left for the next call, and one
that takes longer than was thought is cut off; what it had written is kept. A warning that a kernel
or a graph is not used stands beside every later figure, which is then one of the plain computation.

At the end come the tables for docs/gpu.md; --table prints those of a file, on any machine.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.bring_up import MEASUREMENTS, PARTS
from benchmarks.gpu.measured_tables import markdown
from benchmarks.gpu.results_file import FAILED, ResultsFile, read_runs
from d2f.errors import InputError
from decode.cli import Parser, command

USUAL = "python -m benchmarks.gpu"


@command(interrupted="interrupted; what was measured is in the file, the same command goes on")
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or print what was measured; the exit status."""
    began = time.monotonic()
    parser = Parser(USUAL, description=__doc__, allow_abbrev=False)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON of the results")
    parser.add_argument("--minutes", type=_minutes, default=math.inf, help="to stop within")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="some of the parts")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM for this GPU")
    parser.add_argument(
        "--dry-run", action="store_true", help="everything at tiny sizes, with or without a GPU"
    )
    parser.add_argument(
        "--table", nargs="+", type=Path, metavar="FILE", help="print the tables of these results"
    )
    options = parser.parse_args(arguments)
    if options.table:
        print(markdown([run for path in options.table for run in read_runs(path)]))
        return 0
    if options.output is None:
        raise InputError("expected --output FILE for the results, or --table FILE to print some")

    from benchmarks.fresh_process import in_fresh_process
    from benchmarks.gpu.machine import code, device_and_versions
    from benchmarks.gpu.session import Session

    facts = in_fresh_process(device_and_versions)
    assert facts is not None
    if facts["device"] == "cpu" and not options.dry_run:
        raise InputError("expected an NVIDIA GPU, torch finds none (--dry-run does without)")
    facts |= {"code": code(), "dry_run": options.dry_run}
    results = ResultsFile(options.output, facts)
    session = Session(results, began + 60 * options.minutes, options.vllm_python)
    session.run([found for found in MEASUREMENTS if found.part in options.only])
    print(f"\n{markdown(results.runs)}")
    failed = [name for name, entry in results.measured.items() if entry["state"] == FAILED]
    if failed:
        print(f"error: failed, see above: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _minutes(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected minutes above 0, got {text}")
    return value


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: ends what it started
    sys.exit(main())
