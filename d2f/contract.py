"""Save with a checkpoint how to read its logits and how it was trained."""

from __future__ import annotations

import json
import re
import types
import typing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from d2f.errors import CheckpointError

FILE_NAME = "d2f_contract.json"
PROMPT_RULES = ("bidirectional", "block", "block_causal", "causal")
MOST_BLOCK_SIZE = 2**20  # far above any in use; a decoder counts through a block
_DIGEST = re.compile("[0-9a-f]{64}")
OBJECTIVES = ("d2f", "masked_diffusion", "next_token", "wedlm", "wino_plus")


@dataclass(frozen=True)
class Contract:
    """Hold what a decoder and a trainer must know of a checkpoint.

    family: name in `d2f.families.FAMILIES`. mask_id: id of the mask token, None for a model without
    one. end_ids: ids that end a response. logit_shift: 1 where row p-1 predicts position p (Dream,
    which keeps the shift of the autoregressive model that it began as), else 0. rope_fp32: RoPE is
    applied in fp32 whatever the model's dtype (LLaDA). prompt_rule: what the prompt attends to, one
    of `PROMPT_RULES`; under D2F it is one block that sees itself (``block``).
    objective: how it was trained, one of `OBJECTIVES`, None where not known. block_size: size of
    the blocks that it was trained to decode. noise: lowest and highest mask ratio of D2F
    training. base, base_hash: name and fingerprint (`d2f.adapters`) of the weights that an
    adapter belongs to; None for a whole model.
    """

    family: str
    mask_id: int | None
    end_ids: tuple[int, ...]
    logit_shift: int
    rope_fp32: bool
    prompt_rule: str
    objective: str | None = None
    block_size: int | None = None
    noise: tuple[float, float] | None = None
    base: str | None = None
    base_hash: str | None = None

    def save(self, folder: Path) -> None:
        """Write `FILE_NAME` into `folder`."""
        text = json.dumps(asdict(self), indent=2) + "\n"
        (folder / FILE_NAME).write_text(text, encoding="utf-8")

    @staticmethod
    def load(folder: Path) -> Contract | None:
        """Read the contract in `folder`, None where there is none. Raises CheckpointError."""
        from d2f.checkpoint import read_object  # loads torch

        path = folder / FILE_NAME
        if not path.is_file():
            return None
        values = read_object(path, CheckpointError)
        known = {f.name for f in fields(Contract)}
        required = {"family", "mask_id", "end_ids", "logit_shift", "rope_fp32", "prompt_rule"}
        # An unknown key may change how the model is to be read.
        if set(values) - known or required - set(values):
            raise CheckpointError(
                f"{path} must have the keys {sorted(known)}, got {sorted(values)}"
            )
        for name in ("end_ids", "noise"):  # JSON has no tuples
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        hints = typing.get_type_hints(Contract)
        for name, value in values.items():
            if not _fits(value, hints[name]):
                raise CheckpointError(f"{path}: {name} must be {hints[name]}, got {value!r}")
        _check_values(path, values)
        return Contract(**values)


def _check_values(path: Path, values: dict[str, Any]) -> None:
    """Raise CheckpointError for values of the right types that are out of range."""
    for name, known_values in (("prompt_rule", PROMPT_RULES), ("objective", OBJECTIVES)):
        value = values.get(name)
        if value is not None and value not in known_values:
            raise CheckpointError(
                f"{path}: {name} must be one of {', '.join(known_values)}, got {value!r}"
            )
    noise, mask, ends = values.get("noise"), values["mask_id"], values["end_ids"]
    if noise is not None and not 0 <= noise[0] <= noise[1] <= 1:
        raise CheckpointError(
            f"{path}: noise must be two ratios in [0, 1], the lower first, got {list(noise)}"
        )
    # The mask is never chosen, so such a response would never end by that id.
    if mask is not None and mask in ends:
        raise CheckpointError(
            f"{path}: mask_id must not be one of the end_ids {list(ends)}, got {mask}"
        )
    if any(i < 0 for i in (*ends, *(() if mask is None else (mask,)))):
        raise CheckpointError(f"{path}: ids must be at least 0, got {mask} and {list(ends)}")
    digest = values.get("base_hash")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise CheckpointError(
            f"{path}: base_hash must be 64 digits of a hexadecimal number, got {digest!r}"
        )
    shift, size = values["logit_shift"], values.get("block_size")
    if shift not in (0, 1):
        raise CheckpointError(f"{path}: logit_shift must be 0 or 1, got {shift}")
    if size is not None and not 1 <= size <= MOST_BLOCK_SIZE:
        raise CheckpointError(f"{path}: block_size must lie in [1, {MOST_BLOCK_SIZE}], got {size}")


def _fits(value: object, hint: object) -> bool:
    """Check a JSON value against the type of a contract's field."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in hint.__args__)
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        if not isinstance(value, tuple) or (inner[-1] is not ... and len(value) != len(inner)):
            return False
        return all(_fits(v, inner[0]) for v in value)
    # In Python true and false are whole numbers too; in a contract they are none.
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)  # type: ignore[arg-type]
