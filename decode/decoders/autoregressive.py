"""Autoregressive decoding: one token a forward, an exact causal cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.spans import prefix
from decode.decoders.base import Decoder, max_new_tokens_option
from decode.decoders.session import Session
from decode.step import BlockView, Predictions, Step


@dataclass(frozen=True)
class Autoregressive(Decoder):
    """Decode token after token until an end id or max_new_tokens. Needs a causal model."""

    name: ClassVar[str] = "autoregressive"
    summary: ClassVar[str] = "one token a forward (default for a causal model)"
    labels: ClassVar[Mapping[str, str]] = {"cached": "decoded"}

    max_new_tokens: int | None = max_new_tokens_option()

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        return contract.mask_id is None and contract.draft_id is None

    def check(self, contract: Contract) -> None:
        if contract.prompt_rule != "causal":
            raise InputError(
                "the decoder autoregressive needs a causal model, "
                f"this one of the family {contract.family} is {contract.prompt_rule}"
            )

    def begin(self, prompt: list[int], contract: Contract) -> AutoregressiveSession:
        return AutoregressiveSession(prompt, self.length, contract)


class AutoregressiveSession(Session):
    """Decode a request token after token."""

    def __init__(self, prompt: list[int], max_new_tokens: int, contract: Contract):
        super().__init__(prompt, max_new_tokens, contract)
        self.end = len(prompt)  # of what is decoded
        self.cached = 0

    def step(self) -> Step | None:
        last = int(self.x[self.end - 1])
        ended = self.end > self.prompt_length and last in self.contract.end_ids
        if ended or self.end == len(self.x):
            return None
        cached, self.cached = self.cached, self.end  # causal rows are final once they are fed
        # First the prompt, then the last token. The row of position p - 1 predicts position p,
        # whatever shift the contract has for masked positions.
        fed = np.arange(cached, self.end)
        read = np.array([len(fed) - 1])
        return Step(self.x[cached : self.end], fed, fed, prefix(fed + 1), read, cached=cached)

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        self.reveal(self.end, int(predictions.token[0]), float(predictions.confidence[0]))
        self.end += 1

    @property
    def tokens(self) -> list[int]:
        return self.x[self.prompt_length : self.end].tolist()

    settled = tokens

    def blocks(self) -> list[BlockView]:
        tokens = tuple(self.tokens)
        return [BlockView(0, len(tokens), "cached", tokens)]
