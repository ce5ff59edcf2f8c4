"""python -m decode.evaluate --model tiny-d2f --problems 500

Decodes held-out problems of the tiny tasks with one model and one decoder, and says for each task:
accuracy with its 95 % interval, forwards, visible tokens (before the first end token) and tokens
per forward. `--json FILE` keeps the numbers with versions, device and date.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError, OutputError
from d2f.files import write_beside
from d2f.quiet import quiet
from d2f.tasks.registry import RESPONSE_LENGTH
from decode.commands.decoder_flags import (
    Kind,
    add_flags,
    given_options,
    offered,
    own_names,
    summaries,
)
from decode.commands.parser import (
    Parser,
    add_model,
    add_tasks,
    add_verbose,
    check_least,
    task_list,
)
from decode.commands.run_command import command
from decode.reporting.places import check_place

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from d2f.tasks import Problem
    from decode.decoders import Decoder
    from decode.engine.result import Result
    from decode.reporting.measurements import Measurements


@dataclass(frozen=True)
class Judged:
    """Problems that were decoded together: a result and a verdict each, and the wall seconds of
    the decoding, prompts included."""

    results: list[Result]
    right: list[bool]
    seconds: float

    def measurements(self) -> Measurements:
        """Problem by problem; each has the share of the seconds that its own time has."""
        import numpy as np

        from decode.reporting.measurements import Measurements

        own = np.array([result.seconds for result in self.results])
        return Measurements(
            np.array(self.right, dtype=bool),
            np.array([len(result.tokens) for result in self.results], dtype=np.int64),
            np.array([result.forwards for result in self.results], dtype=np.int64),
            # Requests of a batch overlap: scaled, their seconds add up to the time that passed.
            own * (self.seconds / own.sum()),
        )


def decode_and_judge(
    model: DiffusionModel, decoder: Decoder, problems: Sequence[Problem], *, batch_size: int
) -> Judged:
    """Decode the problems' questions and check the responses; only the decoding is timed."""
    from d2f.tasks import check
    from decode import generate
    from decode.commands.task_problems import as_chat

    prompts = [as_chat(problem) for problem in problems]
    # Prompts are encoded within the time that is counted, answers checked outside of it.
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
    """`count` distinct problems of a task decoded and judged.

    `seconds` is the wall time of the whole batch run, prompts included; `forwards` adds the calls
    that each request was in, so tokens_per_forward is that of a request alone.
    """
    from d2f.tasks import make_problems

    if count < 1:
        raise InputError(f"count must be at least 1, got {count}")
    problems = make_problems(task, split, count, seed)
    judged = decode_and_judge(model, decoder, problems, batch_size=batch_size)
    results, measured = judged.results, judged.measurements().numbers()
    rows = sum(rows for result in results for rows, _ in result.calls)
    return {
        "task": task,
        "split": split,
        **measured,
        "rows_per_forward": rows / measured["forwards"],
        "unfinished": sum(result.finish_reason == "length" for result in results),
        "batch_size": batch_size,
        "seconds": judged.seconds,
        "counts": dict(sum((Counter(result.counts) for result in results), Counter())),
    }


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; `tasks` is a list. Raises InputError, SystemExit after
    --help."""
    options = _parser(offered(arguments)).parse_args(arguments)
    options.tasks = task_list(options.tasks)
    check_least(options, problems=1, batch_size=1)
    return options


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser("python -m decode.evaluate", description=__doc__, allow_abbrev=False)
    add_model(parser)
    parser.add_argument("--decoder", metavar="NAME", help=summaries())
    add_tasks(parser)
    parser.add_argument("--split", default="heldout", choices=("tuning", "heldout"))
    parser.add_argument("--problems", type=int, default=500, help="of each task (default 500)")
    parser.add_argument("--batch-size", type=int, default=32)
    decoder = parser.add_argument_group("decoder, greedy")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    add_verbose(parser)
    names = [name for name in own_names(kinds) if name != "max_new_tokens"]  # a task has its own
    add_flags(decoder, kinds, names)
    return parser


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report that the command line asks for: settings, environment and what was measured
    of each task. Raises InputError before any decoding, NonFiniteLogitsError."""
    from decode.commands.decoder_settings import DecoderSettings
    from decode.commands.load_model import check_options, load, outline
    from decode.commands.task_problems import draw_problems, encode_problems
    from decode.reporting.environment import environment

    given = given_options(options)
    settings = DecoderSettings(options.decoder, given)
    settings.check([RESPONSE_LENGTH[task] for task in options.tasks])
    check_options(options)
    # Decoders and all prompts are checked against the shapes alone, before weights are read.
    shape = outline(options.model, options.adapter)
    decoders = {task: settings.decoder(shape, RESPONSE_LENGTH[task]) for task in options.tasks}
    for task, decoder in decoders.items():
        decoder.check(shape.contract)
        encode_problems(shape, draw_problems(task, options.split, options.problems), decoder)
    model, _ = load(options)
    measured = []
    for task, decoder in decoders.items():
        found = evaluate(
            model,
            decoder,
            task,
            options.problems,
            split=options.split,
            batch_size=options.batch_size,
        )
        measured.append(found | {"max_new_tokens": RESPONSE_LENGTH[task]})
        print(line(measured[-1]), flush=True)
    return {
        "model": options.model,
        "adapter": options.adapter,
        "decoder": decoder.name,
        "settings": given,
        "environment": environment(model),
        "rows": measured,
    }


def line(on: dict[str, Any]) -> str:
    """What was measured, for reading."""
    return (
        f"{on['task']:<10} {on['right']:>4} of {on['problems']} right "
        f"({on['accuracy']:6.1%}, 95 % {on['accuracy_low']:.1%} to {on['accuracy_high']:.1%})  "
        f"{on['tokens_per_forward']:5.2f} visible tokens a forward  "
        f"{on['forwards'] / on['problems']:6.1f} forwards a problem  {on['seconds']:6.1f} s"
    )


def _keep(report: dict[str, Any], path: Path) -> None:
    """Write the report; where that fails, hours of work go to standard output instead."""
    text = json.dumps(report, indent=2) + "\n"
    try:
        write_beside(path, text)
    except OutputError as error:
        print(text, end="", flush=True)
        raise OutputError(f"{error}; the numbers are above instead") from error


@command(interrupted="interrupted; nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    if options.json is not None:  # a link is followed, as by --output
        options.json = Path(os.path.realpath(options.json))
        check_place(options.json, "--json")
    with quiet(options.verbose):
        report = run(options)
    if options.json is not None:
        _keep(report, options.json)


if __name__ == "__main__":
    sys.exit(main())
