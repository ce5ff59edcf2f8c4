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

    def check(self, contract: Contract) -> None:
        if contract.prompt_rule != "causal":
            raise InputError(
                f"the decoder {self.name} needs a causal model, "
                f"this one of the family {contract.family} is {contract.prompt_rule}"
            )

    def begin(self, prompt: list[int], contract: Contract) -> AutoregressiveSession:
        return AutoregressiveSession(self, prompt, contract)


class AutoregressiveSession(Session):
    """Decode a request token after token. Positions before `known` are decided, rows before
    `cached` are not fed any more."""

    def __init__(self, decoder: Decoder, prompt: list[int], contract: Contract):
        super().__init__(prompt, decoder.length, contract)
        self.known, self.cached = len(prompt), 0

    @property
    def tokens(self) -> list[int]:
        return self.x[self.prompt_length : self.known].tolist()

    settled = tokens

    @property
    def done(self) -> bool:
        begun = self.known > self.prompt_length
        ended = begun and int(self.x[self.known - 1]) in self.contract.end_ids
        return ended or self.known == len(self.x)

    def step(self) -> Step | None:
        if self.done:
            return None
        cached, self.cached = self.cached, self.known  # causal rows are final once they are fed
        # First the prompt, then the last token. The row of position p - 1 predicts position p,
        # whatever shift the contract has for masked positions.
        fed = np.arange(cached, self.known)
        read = np.array([len(fed) - 1])
        return Step(self.x[cached : self.known], fed, fed, prefix(fed + 1), read, cached=cached)

    def accept(self, predictions: Predictions) -> None:
        self.revealed = []
        self.reveal(self.known, int(predictions.token[0]), float(predictions.confidence[0]))
        self.known += 1

    def blocks(self) -> list[BlockView]:
        tokens = tuple(self.tokens)
        return [BlockView(0, len(tokens), "cached", tokens)]
