"""What every decoder is: options that are checked, and a session for each request.

A session is a small state machine: `step()` says what to compute, `accept(predictions)` takes the
answer. It never touches the model, so it can be tested with made-up predictions.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError, repr_of
from decode.decoders.checks import is_number
from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS, option, options_of
from decode.engine.result import BlockView, Revealed, TokenLikelihood
from decode.engine.sampling_options import Sampling, sample_seed
from decode.engine.step import Ints, Predictions, Step


@dataclass(frozen=True)
class Card:
    """What the table of docs/decoders.md says of a decoder, as Markdown. decides: what a forward
    decides. rows: what it feeds after the first one. models: those that it decodes."""

    decides: str
    rows: str
    cache: str
    models: str
    source: str = ""


def _temperature(name: str, value: object) -> None:
    if not (is_number(value) and value >= 0):  # type: ignore[operator]
        raise InputError(f"{name} must be 0 or more, got {repr_of(value)}")


def _top_p(name: str, value: object) -> None:
    if not (is_number(value) and 0 < value <= 1):  # type: ignore[operator]
        raise InputError(f"{name} must lie in (0, 1], got {repr_of(value)}")


def _seed(name: str, value: object) -> None:
    # The range that torch's generators take.
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise InputError(f"{name} must be a whole number in [-2^63, 2^64), got {repr_of(value)}")


@dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """Options that all decoders have. Raises InputError for one out of range.

    temperature 0, or below 1e-9, is greedy; top_k None and top_p 1 are off; the same seed gives the
    same tokens whatever else is in the batch, and each prompt and sample that share the decoder get
    one made from it; stop: strings that end the text, themselves not in it. max_new_tokens: the
    longest response; None takes 256, less where the model's context leaves less.

    A decoder also says of itself: name; summary, for --help; labels, what the states of its blocks
    are called where a person reads them; card, its line in the documentation.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    labels: ClassVar[Mapping[str, str]] = {}
    card: ClassVar[Card | None] = None

    temperature: float = option(0.0, "0 is greedy, at least 0", check=_temperature, unit="T")
    top_p: float = option(
        1.0,
        "keep the likeliest tokens up to this share of the probability, in (0, 1]",
        shown="1: off",
        check=_top_p,
        unit="P",
    )
    top_k: int | None = option(None, "keep the K likeliest tokens, at least 1", unit="K")
    seed: int = option(
        0, "seed of the random numbers, of which each prompt and answer has its own", check=_seed
    )
    stop: tuple[str, ...] = ()

    if TYPE_CHECKING:  # each decoder declares it as a field of its own, in its place

        @property
        def max_new_tokens(self) -> int | None: ...

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            one.verify(getattr(self, one.name))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        fine = isinstance(stop, tuple | list) and all(isinstance(s, str) and s for s in stop)
        if not fine:
            raise InputError(f"stop must be non-empty strings, got {repr_of(self.stop)}")
        # The dataclass is frozen; a list, as YAML gives one, becomes a tuple that can be compared.
        object.__setattr__(self, "stop", tuple(stop))

    @classmethod
    def is_default_for(cls, contract: Contract) -> bool:
        """Whether a model of that contract is decoded with this decoder where none is named."""
        return False

    @classmethod
    def completed(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        """The options that were given, and those that follow from how the model was trained."""
        return dict(given)

    def doubt(self, contract: Contract) -> str | None:
        """Why a model of that contract may be decoded badly, if it may be decoded at all."""
        return None

    def sampled(self, prompt: int, sample: int) -> Decoder:
        """This decoder for one sample of one of several prompts that share it: with a seed of its
        own (`decode.engine.sampling_options.sample_seed`). A greedy one has no use for a seed and
        stays as it is."""
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


def common_options() -> list[str]:
    """The options that every decoder has from `Decoder` itself: the choice of tokens."""
    return [option.name for option in options_of(Decoder)]


def searchable(decoder: type[Decoder]) -> tuple[str, ...]:
    """The names of a decoder's own options that are numbers; the length of a response is the
    task's."""
    left = {*common_options(), "max_new_tokens"}
    return tuple(o.name for o in options_of(decoder) if o.is_number and o.name not in left)


class Session(abc.ABC):
    """One request being decoded, over the sequence x of prompt and response.

    x: int64 ``[P + max_new_tokens]``, one slot a position. `revealed` holds what the last `accept`
    decided. `counts` is what the decoder counts of itself, by name. `likelihoods` are those of the
    prompt, where that is what is asked for (`decode.engine.likelihood`).
    """

    def __init__(self, prompt: list[int], max_new_tokens: int, contract: Contract):
        self.prompt_length = len(prompt)
        self.x: Ints = np.zeros(len(prompt) + max_new_tokens, dtype=np.int64)
        self.x[: len(prompt)] = prompt
        self.contract = contract
        self.revealed: list[Revealed] = []
        self.counts: dict[str, int] = {}
        self.likelihoods: list[TokenLikelihood] = []

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
        super().__init__(prompt, max_new_tokens, contract)
        self.masked = np.arange(len(self.x)) >= len(prompt)
        self.x[self.masked] = contract.mask_id

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
