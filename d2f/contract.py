"""Save with a checkpoint how to read its logits and how it was trained."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from d2f.config import explain
from d2f.errors import CheckpointError, did_you_mean

FILE_NAME = "d2f_contract.json"
PromptRule = Literal["bidirectional", "block", "block_causal", "causal"]
Trained = Literal[
    "d2f", "masked_diffusion", "next_token", "self_draft", "wedlm", "wino_plus"
]  # fmt: skip
DRAFT = -1  # the id of a row without a token, which an adapter changes (`d2f.parts.Gate`)
PROMPT_RULES = get_args(PromptRule)
MOST_BLOCK_SIZE = 2**20  # far above any in use; a decoder counts through a block


def _rising(ratios: tuple[float, float]) -> tuple[float, float]:
    if ratios[0] > ratios[1]:
        raise ValueError(f"expected the lower ratio first, got {list(ratios)}")
    return ratios


_Id = Annotated[int, Field(ge=0)]
_Ratio = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Contract:
    """Hold what a decoder and a trainer must know of a checkpoint.

    family: name in `d2f.families.FAMILIES`. mask_id: id of the mask token, None for a model without
    one. end_ids: ids that end a response. logit_shift: 1 where row p-1 predicts position p (Dream,
    which keeps the shift of the autoregressive model that it began as), else 0. rope_fp32: RoPE is
    applied in fp32 whatever the model's dtype (LLaDA). prompt_rule: what the prompt attends to, one
    of `PROMPT_RULES`; under D2F it is one block that sees itself (``block``).
    objective: how it was trained, one of `Trained`, None where not known. block_size: size of the
    blocks that it was trained to decode. response_length: the longest response that it was trained
    on, in tokens; a prompt gets it where no length is given. noise: lowest and highest mask ratio
    of D2F training. draft_id: the token whose embedding the rows begin with that a self-drafting
    adapter changes (`d2f.parts.Gate`), None for other models. base, base_hash: name and fingerprint
    (`d2f.adapters`) of the weights that an adapter belongs to; None for a whole model.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True)

    family: str
    mask_id: _Id | None
    end_ids: tuple[_Id, ...]
    logit_shift: Annotated[int, Field(ge=0, le=1)]
    rope_fp32: bool
    prompt_rule: PromptRule
    objective: Trained | None = None
    block_size: Annotated[int, Field(ge=1, le=MOST_BLOCK_SIZE)] | None = None
    response_length: Annotated[int, Field(ge=1, le=MOST_BLOCK_SIZE)] | None = None
    noise: Annotated[tuple[_Ratio, _Ratio], AfterValidator(_rising)] | None = None
    draft_id: _Id | None = None
    base: str | None = None
    base_hash: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None

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
        return Contract.check(read_object(path, CheckpointError), str(path))

    @staticmethod
    def check(values: dict[str, Any], source: str) -> Contract:
        """Make a contract of JSON's values. Raises CheckpointError, which begins with `source`."""
        known = [field.name for field in fields(Contract)]
        for name in values.keys() - set(known):
            near = did_you_mean(name, known)
            raise CheckpointError(f"{source}: {name}: there is no such key{near}")
        try:
            return _adapter().validate_json(json.dumps(values))  # as JSON: it has no tuples
        except ValidationError as error:
            raise CheckpointError(f"{source}: {explain(error, values, 'contract')}") from error


@cache
def _adapter() -> TypeAdapter[Contract]:
    return TypeAdapter(Contract)
