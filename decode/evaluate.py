"""python -m decode.evaluate --model tiny-d2f --problems 500

Decodes held-out problems of the tiny tasks with one model and one decoder, and says for each task:
accuracy with its 95 % interval, forwards, visible tokens (before the first end token) and tokens
per forward. `--json FILE` keeps the numbers with versions, device and date.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.command import CommandParser
from d2f.errors import InputError, OutputError
from d2f.files import write_beside
from decode.cli.decoder_options import DECODER_NAMES, DECODER_OPTIONS
from decode.cli.places import check_place

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from d2f.tasks import Problem
    from decode.decoders import Decoder
    from decode.result import Result


OPTIONS = [option for option in DECODER_OPTIONS if option.name != "max_new_tokens"]


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson's score interval)."""
    z = 1.959964
    share = right / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        / (1 + z * z / count)
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Judged:
    """Problems that were decoded together: a result and a verdict each, and the wall seconds of
    the decoding, prompts included."""

    results: list[Result]
    right: list[bool]
    seconds: float


def decode_and_judge(
    model: DiffusionModel, decoder: Decoder, problems: Sequence[Problem], *, batch_size: int
) -> Judged:
    """Decode the problems' questions and check the responses; only the decoding is timed."""
    from d2f.tasks import check
    from decode import generate

    prompts = [[{"role": "user", "content": problem.question}] for problem in problems]
    began = time.perf_counter()
    results = generate(model, prompts, decoder, batch_size=batch_size)
    seconds = time.perf_counter() - began
    right = [check(p, r.text or "") for p, r in zip(problems, results, strict=True)]
    return Judged(results, right, seconds)


def evaluate(
    model: DiffusionModel,
    decoder: Decoder,
    task: str,
    count: int,
    *,
    split: str = "heldout",
    seed: int = 0,
    batch_size: int = 32,
) -> dict[str, Any]:
    """One row: `count` distinct problems of a task decoded and judged.

    `seconds` is the wall time of the whole batch run, prompts included; `forwards` adds the calls
    that each request was in, so tokens_per_forward is that of a request alone.
    """
    from d2f.tasks import make_problems

    problems = make_problems(task, split, count, seed)
    judged = decode_and_judge(model, decoder, problems, batch_size=batch_size)
    results, right = judged.results, sum(judged.right)
    tokens = sum(len(result.tokens) for result in results)
    forwards = sum(result.forwards for result in results)
    low, high = wilson(right, count)
    return {
        "task": task,
        "split": split,
        "problems": count,
        "right": right,
        "accuracy": right / count,
        "accuracy_low": low,
        "accuracy_high": high,
        "visible_tokens": tokens,
        "forwards": forwards,
        "tokens_per_forward": tokens / forwards,
        "rows_per_forward": sum(rows for r in results for rows, _ in r.calls) / forwards,
        "unfinished": sum(result.finish_reason == "length" for result in results),
        "batch_size": batch_size,
        "seconds": judged.seconds,
        "counts": dict(sum((Counter(result.counts) for result in results), Counter())),
    }


def environment(model: DiffusionModel) -> dict[str, Any]:
    """What the numbers were measured on."""
    import torch
    import transformers

    cuda = model.device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else processor(),
        "threads": torch.get_num_threads(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "compiled": model.is_compiled,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """The CPU's name."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for entry in information.read_text().splitlines():
            if entry.startswith("model name"):
                return entry.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("python -m decode.evaluate", description=__doc__)
    parser.add_argument("--model", default="tiny-d2f", help="folder, hub name or bundled model")
    parser.add_argument("--adapter", help="LoRA adapter for it (merged)")
    parser.add_argument("--decoder", choices=DECODER_NAMES, help="default: what fits")
    parser.add_argument("--tasks", default="story,countdown,sudoku")
    parser.add_argument("--split", default="heldout", choices=("tuning", "heldout"))
    parser.add_argument("--problems", type=int, default=500, help="of each task (default 500)")
    parser.add_argument("--batch-size", type=int, default=32)
    decoder = parser.add_argument_group("decoder, greedy")
    for option in OPTIONS:
        option.add_to(decoder)
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report that the command line asks for: settings, environment and a row a task."""
    import transformers

    import d2f
    from d2f.tasks.registry import RESPONSE_LENGTH
    from decode.cli.settings import DecoderSettings

    transformers.logging.disable_progress_bar()
    model = d2f.load(
        options.model, adapter=options.adapter, dtype=options.dtype, device=options.device
    )
    model.merge_adapter()
    given = {o.name: getattr(options, o.name) for o in OPTIONS if hasattr(options, o.name)}
    chosen = DecoderSettings(options.decoder, given)
    rows = []
    for task in options.tasks.split(","):
        if task not in RESPONSE_LENGTH:
            raise InputError(f"--tasks must be among {list(RESPONSE_LENGTH)}, got {task!r}")
        decoder = chosen.decoder(model, RESPONSE_LENGTH[task])
        decoder.check(model.contract)
        row = evaluate(
            model,
            decoder,
            task,
            options.problems,
            split=options.split,
            batch_size=options.batch_size,
        )
        rows.append(row | {"max_new_tokens": RESPONSE_LENGTH[task]})
        print(line(rows[-1]), flush=True)
    return {
        "model": options.model,
        "adapter": options.adapter,
        "decoder": decoder.name,
        "settings": given,
        "environment": environment(model),
        "rows": rows,
    }


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    return (
        f"{row['task']:<10} {row['right']:>4} of {row['problems']} right "
        f"({row['accuracy']:6.1%}, 95 % {row['accuracy_low']:.1%} to {row['accuracy_high']:.1%})  "
        f"{row['tokens_per_forward']:5.2f} visible tokens a forward  "
        f"{row['forwards'] / row['problems']:6.1f} forwards a problem  {row['seconds']:6.1f} s"
    )


def _keep(report: dict[str, Any], path: Path) -> None:
    """Write the report; where that fails, hours of work go to standard output instead."""
    text = json.dumps(report, indent=2) + "\n"
    try:
        write_beside(path, text)
    except OutputError as error:
        print(text, end="", flush=True)
        raise OutputError(f"{error}; the numbers are above instead") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.json is not None:
            check_place(options.json, "--json")
        report = run(options)
        if options.json is not None:
            _keep(report, options.json)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
