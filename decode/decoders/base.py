"""What every decoder is: options that are checked, and a session for each request.

A session is a small state machine: `step()` says what to compute, `accept(predictions)` takes the
answer. It never touches the model, so it can be tested with made-up predictions.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError, repr_of
from decode.defaults import DEFAULT_MAX_NEW_TOKENS
from decode.engine.result import BlockView, Revealed
from decode.engine.sampling import Sampling, sample_seed
from decode.engine.step import Ints, Predictions, Step

MOST = 2**20  # tokens, forwards or states


@dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """Options that all decoders have. Raises InputError for one out of range.

    temperature 0, or below 1e-9, is greedy; top_k None and top_p 1 are off; the same seed gives the
    same tokens whatever else is in the batch, and each prompt and sample that share the decoder get
    one made from it; stop: strings that end the text, themselves not in it. max_new_tokens: the
    longest response; None takes 256, less where the model's context leaves less.
    """

    name: ClassVar[str]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()

    if TYPE_CHECKING:  # each decoder declares it as a field of its own, with its own default

        @property
        def max_new_tokens(self) -> int | None: ...

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None:
            whole("max_new_tokens", self.max_new_tokens)
        if not (_is_number(self.temperature) and self.temperature >= 0):
            raise InputError(f"temperature must be 0 or more, got {repr_of(self.temperature)}")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise InputError(f"top_p must lie in (0, 1], got {repr_of(self.top_p)}")
        if self.top_k is not None:
            whole("top_k", self.top_k)
        seed = self.seed
        if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
            raise InputError(f"seed must be a whole number in [-2^63, 2^64), got {repr_of(seed)}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        fine = isinstance(stop, tuple | list) and all(isinstance(s, str) and s for s in stop)
        if not fine:
            raise InputError(f"stop must be non-empty strings, got {repr_of(self.stop)}")
        object.__setattr__(self, "stop", tuple(stop))

    def sampled(self, prompt: int, sample: int) -> Decoder:
        """This decoder for one sample of one of several prompts that share it: with a seed of its
        own (`decode.engine.sampling.sample_seed`). A greedy one has no use for a seed and stays as
        it is."""
        if self.sampling.greedy:
            return self
        return replace(self, seed=sample_seed(self.seed, prompt, sample))

    @property
    def overhang(self) -> int:
        """Positions after the response that may be fed too."""
        return 0

    @property
    def length(self) -> int:
        """The longest response, in tokens: max_new_tokens, by default `DEFAULT_MAX_NEW_TOKENS`
        (`decode.engine.prompts.fitted` takes less where the model's context leaves less)."""
        return self.max_new_tokens or DEFAULT_MAX_NEW_TOKENS

    @property
    def sampling(self) -> Sampling:
        return Sampling(float(self.temperature), self.top_p, self.top_k, self.seed)

    def check(self, contract: Contract) -> None:
        """Raise InputError if this decoder cannot decode a model of that contract."""
        if contract.mask_id is None:
            raise InputError(
                f"the decoder {self.name} needs a model with a mask id, "
                f"the family {contract.family} has none: take autoregressive for it"
            )

    @abc.abstractmethod
    def begin(self, prompt: list[int], contract: Contract) -> Session:
        """The session of one request."""


class Session(abc.ABC):
    """One request being decoded, over the sequence x of prompt and response.

    x: int64 ``[P + max_new_tokens]``, one slot a position. `revealed` holds what the last `accept`
    decided. `counts` is what the decoder counts of itself, by name.
    """

    def __init__(self, prompt: list[int], fill: int, max_new_tokens: int, contract: Contract):
        self.prompt_length = len(prompt)
        self.x: Ints = np.full(len(prompt) + max_new_tokens, fill, dtype=np.int64)
        self.x[: len(prompt)] = prompt
        self.contract = contract
        self.revealed: list[Revealed] = []
        self.counts: dict[str, int] = {}

    @property
    def slots(self) -> int:
        """Slots that the request needs: a position's own, then any scratch slots."""
        return len(self.x)

    @abc.abstractmethod
    def step(self) -> Step | None:
        """What to compute next, None when the request is done."""

    @abc.abstractmethod
    def accept(self, predictions: Predictions) -> None:
        """Take the predictions of the rows that the last step read."""

    @abc.abstractmethod
    def blocks(self) -> list[BlockView]:
        """The response's blocks as they stand."""

    @property
    @abc.abstractmethod
    def tokens(self) -> list[int]:
        """Decoded response ids in order; undecoded positions are left out."""

    @property
    @abc.abstractmethod
    def settled(self) -> list[int]:
        """Response ids before the first that may still change: what may be shown as text."""

    def reveal(self, position: int, token: int, confidence: float) -> None:
        """Decide one position of the sequence."""
        self.x[position] = token
        self.revealed.append(Revealed(position - self.prompt_length, token, confidence))


class MaskedSession(Session):
    """A session of a diffusion decoder: undecoded positions of x hold the mask id."""

    def __init__(self, prompt: list[int], max_new_tokens: int, contract: Contract):
        assert contract.mask_id is not None
        super().__init__(prompt, contract.mask_id, max_new_tokens, contract)
        self.masked = np.arange(len(self.x)) >= len(prompt)

    @property
    def tokens(self) -> list[int]:
        part = slice(self.prompt_length, None)
        return self.x[part][~self.masked[part]].tolist()

    @property
    def settled_end(self) -> int:
        """The first position of the sequence that may still change."""
        masked = np.flatnonzero(self.masked)
        return int(masked[0]) if len(masked) else len(self.x)

    @property
    def settled(self) -> list[int]:
        return self.x[self.prompt_length : self.settled_end].tolist()

    def reveal(self, position: int, token: int, confidence: float) -> None:
        super().reveal(position, token, confidence)
        self.masked[position] = False

    def view(self, start: int, end: int) -> tuple[int | None, ...]:
        """Tokens of sequence positions ``[start, end)``, None where masked."""
        tokens, masked = self.x[start:end].tolist(), self.masked[start:end].tolist()
        return tuple(None if m else token for token, m in zip(tokens, masked, strict=True))


def whole(name: str, value: object) -> None:
    """Raise InputError unless value is a whole number of at least 1, and no more than a response
    can have tokens: what counts them up would not end."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {repr_of(value)}")
    if value > MOST:
        raise InputError(f"{name} must be at most {MOST}, got {repr_of(value)}")


def ratio(name: str, value: object) -> None:
    """Raise InputError unless value lies in [0, 1]."""
    if not (_is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
        raise InputError(f"{name} must lie in [0, 1], got {repr_of(value)}")


def not_negative(name: str, value: object) -> None:
    """Raise InputError unless value is a finite number of at least 0."""
    if not (_is_number(value) and value >= 0):  # type: ignore[operator]
        raise InputError(f"{name} must be a finite number of at least 0, got {repr_of(value)}")


def boolean(name: str, value: object) -> None:
    """Raise InputError unless value is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {repr_of(value)}")


def one_of(name: str, value: object, words: tuple[str, ...]) -> None:
    """Raise InputError unless value is one of the words."""
    if not isinstance(value, str) or value not in words:
        raise InputError(f"{name} must be one of {', '.join(words)}, got {repr_of(value)}")


def greedy_only(what: str, temperature: float) -> None:
    """Raise InputError unless decoding is greedy, which is what drafts are checked against."""
    if temperature:
        raise InputError(
            f"{what} needs temperature 0: what it drafts is checked against greedy decoding, got "
            f"{repr_of(temperature)}"
        )


def _is_number(value: object) -> bool:
    """Whether value is a finite number, as a float says it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
