"""The command line of `python -m decode.evaluate`; parsing it does not import torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from d2f.errors import InputError
from d2f.shipped import DECODING, find_config
from decode.commands.decoder_flags import Kind, add_decoder, add_sampling, offered
from decode.commands.parser import (
    Parser,
    add_model,
    add_tasks,
    add_verbose,
    add_workers,
    check_least,
    check_model,
    check_samples,
    check_workers,
    chosen_tasks,
)

_DESCRIPTION = """\
python -m decode.evaluate --model tiny-d2f --problems 500

Decodes problems of tasks with one model and one decoder, and says for each task: accuracy with its
95 % interval, forwards, visible tokens (before the first end token) and tokens per forward; of
several samples a problem pass@k and the majority vote too. The tasks are the tiny ones, task files,
or a file or data set of your own with a judge:

  --tasks gsm8k    --tasks my_task.yaml    --data problems.jsonl --judge numeric
"""
_EPILOG = """\
exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any work;
130 interrupted, the answers in --output stay and the same command goes on.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; `tasks` are `d2f.tasks.Task`, `pass_at` whole numbers.
    Raises InputError, SystemExit after --help."""
    options = _parser(offered(arguments)).parse_args(arguments)
    check_model(options)
    check_least(options, problems=1, batch_size=1, judge_jobs=1)
    check_workers(options)
    check_samples("--samples", options.samples)
    options.pass_at = _pass_at(options.pass_at, options.samples)
    options.tasks = chosen_tasks(options)
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.evaluate",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    model = parser.add_argument_group("model")
    add_model(model, "merge", "family", "compile", "tensor-parallel")
    _add_problems(parser.add_argument_group("problems"))
    decoder = parser.add_argument_group(
        "decoder", "An option that the chosen decoder does not have is an error."
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    _add_running(parser.add_argument_group("running and output"))
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)  # last, so that a clash is known for one with the command's own
    return parser


def _add_problems(group: argparse._ArgumentGroup) -> None:
    add_tasks(group)
    group.add_argument(
        "--split",
        default="heldout",
        choices=("tuning", "heldout", "all"),
        help="which problems (default heldout); all: every row of a task's data, also those that "
        "tuning may see",
    )
    group.add_argument(
        "--problems",
        type=int,
        metavar="N",
        help="of each task, at least 1 (default: 500 generated ones, of data all that there are)",
    )
    group.add_argument(
        "--samples",
        type=int,
        default=1,
        metavar="N",
        help="answers a problem, each with a seed of its own: several need a --temperature "
        "(default 1)",
    )
    group.add_argument(
        "--pass-at",
        default="",
        metavar="LIST",
        help="1,10: the chance that one of so many samples is right, from --samples that are at "
        "least as many (the unbiased estimator of the HumanEval paper)",
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--batch-size",
        type=int,
        default=32,
        metavar="N",
        help="problems decoded together, at least 1; the tokens do not depend on it (default 32)",
    )
    add_workers(group)
    group.add_argument(
        "--output",
        metavar="DIR",
        help="folder for answers.jsonl (every answer as it comes; the same command again goes on "
        "where it stopped) and report.json",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="file for the numbers alone")
    group.add_argument(
        "--judge-jobs",
        type=int,
        metavar="N",
        help="processes of the judges python and math, each for a response, at least 1; the "
        "verdicts do not depend on it (default: a core each, 8 at most)",
    )
    add_verbose(group)


def _pass_at(text: str, samples: int) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        found = [0]
    if len(set(found)) < len(found) or not all(1 <= k <= samples for k in found):
        raise InputError(
            f"--pass-at must be whole numbers from 1 to --samples {samples}, each once, as 1,10: "
            f"got {text!r}"
        )
    return found
