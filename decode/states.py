"""python -m decode.states --model tiny-d2f --tasks story,sudoku --output runs/states.json

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
from d2f.files import make_folder
from decode.cli.decoder_options import DECODER_OPTIONS
from decode.cli.places import hold_output

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.api import Prompt
    from decode.decoders import D2F
    from decode.result import BlockView

OPTIONS = [o for o in DECODER_OPTIONS if o.name in ("tau_add", "tau_act", "tau_conf")]


def record(
    model: DiffusionModel, prompts: Sequence[Prompt], decoder: D2F, *, batch_size: int
) -> list[tuple[float, ...]]:
    """The state that each forward of each prompt feeds."""
    from decode import stream

    states: list[tuple[float, ...]] = []
    for event in stream(model, prompts, decoder, batch_size=batch_size):
        if event.forward == 1:
            states.append((1.0,))  # the first block, just appended
        if event.result is None:
            states.append(tuple(_ratio(block) for block in event.blocks))
    return states


def _ratio(block: BlockView) -> float:
    return block.tokens.count(None) / len(block.tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m decode.states",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny-d2f", help="folder, hub name or bundled model")
    parser.add_argument("--adapter", help="LoRA adapter for it (merged)")
    parser.add_argument("--tasks", default="story,countdown,sudoku")
    parser.add_argument("--problems", type=int, default=64, help="of each task (default 64)")
    parser.add_argument("--split", default="train", choices=("train", "tuning", "heldout"))
    parser.add_argument("--seed", type=int, default=0, help="of the problems")
    parser.add_argument(
        "--block-sizes", help="as 4,8: states of each (default: the one the model was trained with)"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    decoder = parser.add_argument_group("pipeline")
    for option in OPTIONS:
        option.add_to(decoder)
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    parser.add_argument("--output", type=Path, required=True, help="file for the states")
    return parser


def run(options: argparse.Namespace) -> None:
    """Record what the command line asks for."""
    import d2f
    from d2f.states import PipelineStates
    from d2f.tasks import make_problems
    from d2f.tasks.registry import RESPONSE_LENGTH
    from decode.cli.output import check_place
    from decode.decoders import D2F
    from decode.decoders.d2f import DEFAULT_BLOCK_SIZE

    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {options.output}: {error.strerror}") from error
    check_place(options.output, "--output")
    tasks = options.tasks.split(",")
    unknown = [task for task in tasks if task not in RESPONSE_LENGTH]
    if unknown:
        raise InputError(f"--tasks must be among {list(RESPONSE_LENGTH)}, got {unknown}")
    given = {o.name: getattr(options, o.name) for o in OPTIONS if hasattr(options, o.name)}
    model = d2f.load(
        options.model, adapter=options.adapter, dtype=options.dtype, device=options.device
    )
    model.merge_adapter()
    sizes = _sizes(options.block_sizes) or [model.contract.block_size or DEFAULT_BLOCK_SIZE]
    found: dict[int, list[tuple[float, ...]]] = {}
    for size in sizes:
        found[size] = []
        for task in tasks:
            decoder = D2F(block_size=size, max_new_tokens=RESPONSE_LENGTH[task], **given)
            problems = make_problems(task, options.split, options.problems, options.seed)
            prompts = [[{"role": "user", "content": p.question}] for p in problems]
            found[size] += record(model, prompts, decoder, batch_size=options.batch_size)
        print(f"block size {size}: {len(found[size])} states")
    about = {"model": options.model, "tasks": tasks, "problems": options.problems, **given}
    PipelineStates(found).save(options.output, **about)


def _sizes(text: str | None) -> list[int]:
    """The block sizes of ``4,8``."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise InputError(f"--block-sizes must be as 4,8, got {text!r}") from error


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status."""
    options = _parser().parse_args(arguments)
    try:
        make_folder(options.output.parent)
        with hold_output(options.output):
            run(options)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
