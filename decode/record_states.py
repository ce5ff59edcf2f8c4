"""python -m decode.record_states --model tiny-d2f --tasks story,sudoku --output runs/states.json

Decodes problems of the tiny tasks with D2F's pipeline and records, at each forward, the mask ratio
of each open block: what training with `noise.schedule: pipeline` and `noise.states` draws from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from d2f.errors import InputError
from d2f.files import locked_file, make_folder
from d2f.quiet import quiet
from decode.cli import (
    Parser,
    add_flags,
    add_model,
    add_tasks,
    add_verbose,
    check_least,
    chosen_tasks,
    command,
    given_options,
)
from decode.decoders.base import DEFAULT_BLOCK_SIZE
from decode.decoders.d2f import D2F

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.api import Prompt
    from decode.step import BlockView


def record(
    model: DiffusionModel, prompts: Sequence[Prompt], decoder: D2F, *, batch_size: int
) -> list[tuple[float, ...]]:
    """The state that each forward of each prompt feeds."""
    from decode import stream

    states: list[tuple[float, ...]] = []
    for event in stream(model, prompts, decoder, batch_size=batch_size):
        if event.forward == 1:
            states.append((1.0,))  # the first block, just appended
        # An event shows the blocks of the forward to come; after the last one there is none.
        if event.result is None:
            states.append(tuple(_ratio(block) for block in event.blocks))
    return states


def _ratio(block: BlockView) -> float:
    return block.tokens.count(None) / len(block.tokens)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("python -m decode.record_states", description=__doc__, allow_abbrev=False)
    add_model(parser)
    add_tasks(parser)
    parser.add_argument("--problems", type=int, default=64, help="of each task (default 64)")
    parser.add_argument("--split", default="train", choices=("train", "tuning", "heldout"))
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument(
        "--block-sizes", help="as 4,8: states of each (default: the one the model was trained with)"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    decoder = parser.add_argument_group("pipeline")
    add_flags(decoder, [D2F], ("tau_add", "tau_act", "tau_conf"))
    parser.add_argument("--output", type=Path, required=True, help="file for the states")
    add_verbose(parser)
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; `tasks` and `block_sizes` are lists. Raises InputError,
    SystemExit after --help."""
    options = _parser().parse_args(arguments)
    options.tasks = chosen_tasks(options)
    check_least(options, problems=1, batch_size=1, seed=0)
    options.block_sizes = _sizes(options.block_sizes)
    return options


def run(options: argparse.Namespace) -> None:
    """Record what the command line asks for."""
    from d2f.noise import PipelineStates
    from decode.cli import check_options, load, outline
    from decode.jobs import draw_problems, encode_problems

    given = given_options(options)
    check_options(options)
    shape = outline(options.model, options.adapter)
    sizes = options.block_sizes or [shape.contract.block_size or DEFAULT_BLOCK_SIZE]
    work = []
    for size in sizes:
        for task in options.tasks:
            decoder = D2F(block_size=size, max_new_tokens=task.response_length, **given)
            # All sizes and tasks are checked before the weights are read.
            decoder.check(shape.contract)
            problems = draw_problems(task, options.split, options.problems, options.seed)
            work.append((size, encode_problems(shape, problems, decoder), decoder))
    model, _ = load(options)
    found: dict[int, list[tuple[float, ...]]] = {size: [] for size in sizes}
    for size, prompts, decoder in work:
        found[size] += record(model, prompts, decoder, batch_size=options.batch_size)
    for size, states in found.items():
        print(f"block size {size}: {len(states)} states")
    about = {
        "model": options.model,
        "tasks": [t.name for t in options.tasks],
        "problems": options.problems,
        **given,
    }
    PipelineStates(found).save(options.output, **about)


def _sizes(text: str | None) -> list[int]:
    """The block sizes of ``4,8``."""
    try:
        sizes = [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise InputError(f"--block-sizes must be as 4,8, got {text!r}") from error
    if len(set(sizes)) < len(sizes):
        raise InputError(f"--block-sizes must have each size once, got {text!r}")
    return sizes


@command(interrupted="interrupted; nothing was written", goes_on_unread=True)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    make_folder(options.output.parent)
    with quiet(options.verbose), locked_file(options.output):
        run(options)


if __name__ == "__main__":
    sys.exit(main())
