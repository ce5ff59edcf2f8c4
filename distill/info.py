"""Say what a checkpoint is taken for, and what can be done with it: d2f info."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import InputError
from d2f.flags import Verbose, check_family_name, check_model_name
from d2f.quiet import quiet

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

BYTES = {"float32": 4, "bfloat16": 2}  # a weight


@dataclass(kw_only=True)
class Options:
    """Say what a checkpoint is taken for and by which keys, its mask, ends, block and shift, the
    memory of its weights, which decoders and objectives fit, and why the others do not. No weights
    are read."""

    model: Positional[str]
    """folder, hub name or bundled model"""
    family: str | None = None
    """take it for one of this family"""
    verbose: Verbose = False

    def check(self) -> None:
        """Raise InputError for a model that cannot be."""
        check_model_name(self.model)
        check_family_name(self.family)


def report(model: DiffusionModel) -> Iterator[str]:
    """Yield the lines of a model, which may be without weights."""
    from d2f.checkpoint import read_object
    from d2f.contract import FILE_NAME
    from decode.decoders import DECODERS, as_decoder
    from distill.config import parse_config
    from distill.objectives import OBJECTIVES

    contract, tokenizer, config = model.contract, model.tokenizer, model.config
    raw = read_object(f"{model.path}/config.json")
    by = [f"{key} {raw[key]}" for key in ("model_type", "architectures") if raw.get(key)]
    by += [FILE_NAME] * (Path(str(model.path)) / FILE_NAME).is_file()
    yield f"{model.path}: family {contract.family}, by {', '.join(by)}"

    def spelled(ids: Iterable[int]) -> str:
        said = (f"{i}" if tokenizer is None else f"{i} {tokenizer.decode([i])!r}" for i in ids)
        return ", ".join(said) or "none"

    mask = spelled([] if contract.mask_id is None else [contract.mask_id])
    yield f"mask {mask}; ends {spelled(contract.end_ids)}"
    yield (
        f"row p predicts position {'p + 1' if contract.logit_shift else 'p'}; prompt rule "
        f"{contract.prompt_rule}; block size {contract.block_size or 'not given'}; objective "
        f"{contract.objective or 'not given'}; {model.context_length} positions"
    )
    count = model.backbone.num_parameters()
    kept = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    sizes = {name: count * size for name, size in BYTES.items()}
    sizes |= {"int8": 2 * kept + count - kept, "nf4": int(2 * kept + 0.56 * (count - kept))}
    memory = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in sizes.items())
    yield f"{type(model.backbone).__name__}, {count:,} parameters: {memory}"

    def decodes(name: str) -> None:
        as_decoder(name, contract).check(contract)

    def trains(name: str) -> None:
        data = {"file": "data.jsonl", "row_length": 64, "rows": 1}
        values = {"init": model.path, "output": "run", "steps": 1, "data": data, "objective": name}
        OBJECTIVES[name].check_model(model, parse_config(values, name))

    yield from _fitting("decoders", DECODERS, decodes)
    yield from _fitting("objectives", OBJECTIVES, trains)


def _fitting(what: str, names: Iterable[str], check: Callable[[str], None]) -> Iterator[str]:
    fit, refused = [], {}
    for name in names:
        try:
            check(name)
            fit.append(name)
        except InputError as error:
            refused[name] = str(error)
    yield f"{what}: {', '.join(fit) or 'none'}"
    yield from (f"  not {name}: {reason}" for name, reason in refused.items())


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = command_line.parse(Options, arguments, usual="python -m distill.info")
    with quiet(options.verbose):
        from decode.cli import outline

        lines = list(report(outline(options.model, family=options.family)))
    print("\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
