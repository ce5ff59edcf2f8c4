"""Record the states of D2F's pipeline while it decodes problems, for training with them:
python -m decode.record_states states.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, Suppress, arg

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import InputError
from d2f.files import locked_file, make_folder
from d2f.flags import check_least
from d2f.quiet import quiet
from decode.cli import OneProcessModel, TaskOptions, decoder_flag
from decode.decoders.base import DEFAULT_BLOCK_SIZE, options_of
from decode.decoders.d2f import D2F
from decode.display import ShownProgress, standard_output

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.api import Prompt


@dataclass(kw_only=True)
class RecordOptions:
    """Choose what is recorded."""

    problems: Annotated[int, arg(metavar="N")] = 64
    """of each task"""
    split: Literal["train", "tuning", "heldout"] = "train"
    """whose problems"""
    seed: Annotated[int, arg(metavar="N")] = 0
    """of the problems"""
    block_sizes: Annotated[str | None, arg(metavar="LIST")] = None
    """as 4,8: states of each (default: the one the model was trained with)"""
    batch_size: Annotated[int, arg(metavar="N")] = 32
    """problems decoded together"""
    output: Positional[Path]
    """file for the states"""
    given: Suppress[dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def more(cls, words: Sequence[str]) -> list[Any]:
        """Make flags of the thresholds."""
        names = ("tau_add", "tau_act", "tau_conf")
        return [decoder_flag(one, words) for one in options_of(D2F) if one.name in names]

    @property
    def sizes(self) -> list[int]:
        """Read --block-sizes."""
        try:
            sizes = [int(part) for part in (self.block_sizes or "").split(",") if self.block_sizes]
        except ValueError:
            sizes = [0, 0]
        if len(set(sizes)) < len(sizes):
            raise InputError(f"--block-sizes must be as 4,8, each once, got {self.block_sizes!r}")
        return sizes

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, problems=1, batch_size=1, seed=0)
        _ = self.sizes


@dataclass(kw_only=True)
class Options(OneProcessModel, TaskOptions, RecordOptions):
    """Decode problems of tasks with D2F's pipeline and record, at each forward, the mask ratio of
    each open block: what training with `noise.schedule: pipeline` and `noise.states` draws from.
    """

    examples = (
        "python -m decode.record_states states.json --tasks story",
        "python -m decode.record_states states.json --model my-student --block-sizes 4,8",
    )


@command(interrupted="interrupted; nothing was written")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and return its exit status."""
    options = command_line.parse(Options, arguments, usual="python -m decode.record_states")
    make_folder(options.output.parent)
    with quiet(options.verbose), locked_file(options.output):
        run(options)


def run(options: Options) -> None:
    """Record the states and write them. Raises InputError before weights are read."""
    from d2f.noise import PipelineStates
    from decode.cli import checked_outline, load
    from decode.jobs import draw_problems, encode_problems

    shape = checked_outline(options)
    sizes = options.sizes or [shape.contract.block_size or DEFAULT_BLOCK_SIZE]
    work = []
    for size in sizes:
        for task in options.chosen:
            length = task.response_length
            decoder = D2F(block_size=size, max_new_tokens=length, **options.given)
            decoder.check(shape.contract)
            problems = draw_problems(task, options.split, options.problems, options.seed)
            work.append((size, encode_problems(shape, problems, decoder), decoder))
    model, _ = load(options)
    found: dict[int, list[tuple[float, ...]]] = {size: [] for size in sizes}
    with ShownProgress(standard_output(), "problems") as shown:
        shown.begin(sum(len(prompts) for _, prompts, _ in work))
        for size, prompts, decoder in work:
            found[size] += record(model, prompts, decoder, options.batch_size, shown)
    for size, states in found.items():
        print(f"block size {size}: {len(states)} states")
    about = {"model": options.model, "tasks": [task.name for task in options.chosen]}
    PipelineStates(found).save(options.output, **about, problems=options.problems, **options.given)


def record(
    model: DiffusionModel,
    prompts: Sequence[Prompt],
    decoder: D2F,
    batch_size: int,
    shown: ShownProgress | None = None,
) -> list[tuple[float, ...]]:
    """Return the state that each forward of each prompt feeds: the mask ratio of each block."""
    from decode import stream

    states: list[tuple[float, ...]] = []
    for event in stream(model, prompts, decoder, batch_size=batch_size):
        if event.forward == 1:
            states.append((1.0,))  # the first block, just appended
        # An event shows the blocks of the forward to come; after the last one there is none.
        if event.result is None:
            ratios = (block.tokens.count(None) / len(block.tokens) for block in event.blocks)
            states.append(tuple(ratios))
        elif shown is not None:
            shown.advance()
    return states


if __name__ == "__main__":
    sys.exit(main())
