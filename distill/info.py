"""Say what a checkpoint is taken for, and what can be done with it: d2f info."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tyro.conf import Positional

from d2f import flags as command_line
from d2f.command import command
from d2f.errors import InputError
from d2f.flags import Switch, Verbose, check_family_name, check_model_name
from d2f.models import names
from d2f.quiet import quiet

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

BYTES = {"float32": 4, "bfloat16": 2}  # a weight


@dataclass(kw_only=True)
class Options:
    """Say what a checkpoint is taken for and by which keys, its mask, ends, block and shift, the
    memory of its weights, which decoders and objectives fit, and why the others do not; of one that
    ships with this package its tasks. No weights are read. Without a model: list those."""

    examples = ("d2f info tiny-d2f", "d2f info GSAI-ML/LLaDA-8B-Instruct --json")

    model: Positional[str | None] = None
    """folder, hub name or bundled model"""
    family: str | None = None
    """take it for one of this family"""
    json: Switch = False
    """print an object of JSON"""
    verbose: Verbose = False

    def check(self) -> None:
        """Raise InputError for a model that cannot be."""
        if self.model is not None:
            check_model_name(self.model)
        check_family_name(self.family)


def facts(model: DiffusionModel) -> dict[str, Any]:
    """Return what is to be said of a model, which may be without weights."""
    from d2f.checkpoint import read_object
    from d2f.contract import FILE_NAME
    from decode.decoders import DECODERS, as_decoder
    from distill.config import parse_config
    from distill.objectives import OBJECTIVES

    contract, tokenizer, config = model.contract, model.tokenizer, model.config
    raw = read_object(f"{model.path}/config.json")
    by = [f"{key} {raw[key]}" for key in ("model_type", "architectures") if raw.get(key)]
    by += [FILE_NAME] * (Path(str(model.path)) / FILE_NAME).is_file()

    def token(number: int) -> dict[str, Any]:
        return {"id": number, "text": tokenizer.decode([number]) if tokenizer else None}

    count = model.backbone.num_parameters()
    kept = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    sizes = {name: count * size for name, size in BYTES.items()}
    sizes |= {"int8": 2 * kept + count - kept, "nf4": int(2 * kept + 0.56 * (count - kept))}

    def decodes(name: str) -> None:
        as_decoder(name, contract).check(contract)

    def trains(name: str) -> None:
        data = {"file": "data.jsonl", "row_length": 64, "rows": 1}
        values = {"init": model.path, "output": "run", "steps": 1, "data": data, "objective": name}
        OBJECTIVES[name].check_model(model, parse_config(values, name))

    return {
        "path": model.path,
        "family": contract.family,
        "by": by,
        "mask": None if contract.mask_id is None else token(contract.mask_id),
        "ends": [token(number) for number in contract.end_ids],
        "logit_shift": contract.logit_shift,
        "prompt_rule": contract.prompt_rule,
        "block_size": contract.block_size,
        "objective": contract.objective,
        "context": model.context_length,
        "class": type(model.backbone).__name__,
        "parameters": count,
        "bytes": sizes,
        "decoders": fitting(DECODERS, decodes),
        "objectives": fitting(OBJECTIVES, trains),
    }


def fitting(names: Iterable[str], check: Callable[[str], None]) -> dict[str, str | None]:
    """Return why each does not fit, None where it does."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            check(name)
            found[name] = None
        except InputError as error:
            found[name] = str(error)
    return found


def text(found: dict[str, Any]) -> str:
    """Write the facts for a person."""

    def tokens(some: Iterable[dict[str, Any] | None]) -> str:
        shown = (f"{t['id']}" + (f" {t['text']!r}" if t["text"] else "") for t in some if t)
        return ", ".join(shown) or "none"

    memory = ", ".join(f"{name} {size / 1e6:,.0f} MB" for name, size in found["bytes"].items())
    lines = [
        f"{found['path']}: family {found['family']}, by {', '.join(found['by'])}",
        f"mask {tokens([found['mask']])}; ends {tokens(found['ends'])}",
        f"row p predicts position {'p + 1' if found['logit_shift'] else 'p'}; prompt rule "
        f"{found['prompt_rule']}; block size {found['block_size'] or 'not given'}; objective "
        f"{found['objective'] or 'not given'}; {found['context']} positions",
        f"{found['class']}, {found['parameters']:,} parameters: {memory}",
    ]
    if found["tasks"]:
        lines.append(f"tasks of which it has most problems right: {', '.join(found['tasks'])}")
    for what in ("decoders", "objectives"):
        fit = [name for name, reason in found[what].items() if reason is None]
        lines.append(f"{what}: {', '.join(fit) or 'none'}")
        lines += [f"  not {name}: {reason}" for name, reason in found[what].items() if reason]
    return "\n".join(lines)


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = command_line.parse(Options, arguments, usual="python -m distill.info")
    if options.model is None:
        print(json.dumps(list(names())) if options.json else "\n".join(names()))
        return
    with quiet(options.verbose):
        from decode.cli import outline
        from decode.pipeline import mostly_right

        found = facts(outline(options.model, family=options.family))
        found["tasks"] = mostly_right(options.model)
    print(json.dumps(found) if options.json else text(found))


if __name__ == "__main__":
    sys.exit(main())
