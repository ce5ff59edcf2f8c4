"""python -m benchmarks.shared_cores --model tiny-wedlm

What decoding keeps where other work has the cores: held-out problems are decoded one at a time, by
processes of their own, on idle cores and then beside a process on every core that does nothing but
compute. Tokens a second, the median of some runs that take turns, and the share of what one thread
has alone:

    one thread     --threads 1
    auto           what the commands do by default
    as PyTorch     all cores as threads, which wait as PyTorch leaves it to its OpenMP
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from d2f.device import COUNT, SPINS, usable_cpus, users_environment
from d2f.files import write_beside

LIBGOMP = "300000"  # spins of GNU's runtime where nothing is said, by its documentation
WAYS: dict[str, tuple[str, str]] = {
    "one thread": ("1", COUNT),
    "auto": ("auto", COUNT),
    "as PyTorch": (str(usable_cpus()), LIBGOMP),
}
"""Threads and spins."""
BUSY = f"{shlex.quote(sys.executable)} -c 'while True: pass'"


def decode_for(model: str, threads: str, seconds: float) -> float:
    """Visible tokens a second of held-out problems, one at a time, for so long; the first tenth of
    the time, in which what is learned from forwards is learned, is not counted."""
    import d2f
    import decode
    from d2f.tasks import make_problems
    from decode.decoders import Decoder

    loaded = d2f.load(model, threads=int(threads) if threads.isdecimal() else threads)
    wedlm = loaded.contract.objective == "wedlm"
    decoder: Decoder = decode.D2F(max_new_tokens=96)
    if wedlm:
        decoder = decode.WeDLM(8, verify="ar", max_new_tokens=96)
    prompts = [problem.question for problem in make_problems("story", "heldout", 64)]
    began = time.perf_counter()
    counted, tokens, at = None, 0, 0
    while (now := time.perf_counter()) < began + seconds:
        if counted is None and now >= began + seconds / 10:
            counted, tokens = now, 0
        tokens += len(decode.generate(loaded, prompts[at % len(prompts)], decoder)[0].tokens)
        at += 1
    assert counted is not None
    return tokens / (now - counted)


@contextmanager
def busy(command: str, count: int) -> Iterator[None]:
    """`count` processes of a command run meanwhile."""
    others = [subprocess.Popen(shlex.split(command)) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
        for other in others:
            other.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-wedlm", help="folder, hub name or bundled model")
    parser.add_argument("--seconds", type=float, default=15.0, help="a run (default 15)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--busy", default=BUSY, metavar="COMMAND", help="one of the other work")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(decode_for(options.model, options.child, options.seconds))
        return 0
    count, found = usable_cpus(), {}
    for name, others in (("alone", 0), ("shared", count)):
        runs: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.repeat):
            with busy(options.busy, others):
                for way in WAYS:
                    runs[way].append(_run(options.model, way, options.seconds))
        found[name] = runs
    one = statistics.median(found["alone"]["one thread"])
    print(f"{options.model}, {count} processors, {options.repeat} runs of {options.seconds:g} s")
    print("| cores | threads | tokens/s | slowest to fastest run | of one thread alone |")
    print("|---|---|---|---|---|")
    for name, runs in found.items():
        for way, speeds in runs.items():
            middle = statistics.median(speeds)
            spread = f"{min(speeds):,.0f} to {max(speeds):,.0f}"
            print(f"| {name} | {way} | {middle:,.0f} | {spread} | {100 * middle / one:.0f} % |")
    if options.json is not None:
        write_beside(options.json, json.dumps({"processors": count, **found}, indent=1) + "\n")
    return 0


def _run(model: str, way: str, seconds: float) -> float:
    threads, spins = WAYS[way]
    command = [sys.executable, "-m", "benchmarks.shared_cores"]
    command += ["--model", model, "--seconds", str(seconds), "--child", threads]
    around = {key: text for key, text in users_environment().items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        command, env={**around, SPINS: spins}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main())
