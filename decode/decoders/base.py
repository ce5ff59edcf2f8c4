"""What every decoder is: options that are checked, and a session for each request.

A session is a small state machine: `step()` says what to compute, `accept(predictions)` takes the
answer. It never touches the model, so it can be tested with made-up predictions.
"""

from __future__ import annotations

import abc
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Union, get_args, get_origin

import numpy as np

from d2f.contract import Contract
from d2f.errors import InputError, repr_of
from d2f.spans import block_ends
from decode.step import (
    BlockView,
    Ints,
    Predictions,
    Revealed,
    Sampling,
    Step,
    TokenLikelihood,
    sample_seed,
)

# What an option may be: an error names the option, what it may be and what came.

MOST = 2**20  # tokens, forwards or states


def whole_number(name: str, value: object, *, least: int = 1, most: int = MOST) -> None:
    """Raise InputError unless value is a whole number of at least `least`, and by default no more
    than a response can have tokens: what counts them up would not end."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {repr_of(value)}")
    if value > most:
        raise InputError(f"{name} must be at most {most}, got {repr_of(value)}")


def ratio(name: str, value: object) -> None:
    """Raise InputError unless value lies in [0, 1]."""
    if not (is_number(value) and 0 <= value <= 1):  # type: ignore[operator]
        raise InputError(f"{name} must lie in [0, 1], got {repr_of(value)}")


def not_negative(name: str, value: object) -> None:
    """Raise InputError unless value is a finite number of at least 0."""
    if not (is_number(value) and value >= 0):  # type: ignore[operator]
        raise InputError(f"{name} must be a finite number of at least 0, got {repr_of(value)}")


def boolean(name: str, value: object) -> None:
    """Raise InputError unless value is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {repr_of(value)}")


def one_of(name: str, value: object, words: Iterable[str]) -> None:
    """Raise InputError unless value is one of the words."""
    if not isinstance(value, str) or value not in tuple(words):
        raise InputError(f"{name} must be one of {', '.join(words)}, got {repr_of(value)}")


def greedy_only(what: str, temperature: float) -> None:
    """Raise InputError unless decoding is greedy, which is what drafts are checked against."""
    if temperature:
        raise InputError(
            f"{what} needs temperature 0: what it drafts is checked against greedy decoding, got "
            f"{repr_of(temperature)}"
        )


def is_number(value: object) -> bool:
    """Whether value is a finite number, as a float says it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


# Options of decoders: dataclass fields that say what they mean, what they may be, what to try.
#
# A decoder declares `tau: float = option(0.9, "confidence from which ...", check=ratio)` once;
# flags,
# configuration keys, their checks, the grids of tuning and the reference page are read from it.

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_BLOCK_SIZE = 32
Check = Callable[[str, object], None]


@dataclass(frozen=True)
class Option:
    """An option of one decoder.

    kind: int, float, bool, or the words to choose from. words: those that a number's option takes
    in place of one, as "auto". may_be_none: whether None is a value.
    default: the value; shown: the default in words. search: the values that tuning tries where none
    are given. unit: what stands for a number in --help. check: raises InputError for a bad value.
    """

    name: str
    kind: type | tuple[str, ...]
    words: tuple[str, ...]
    may_be_none: bool
    default: Any
    help: str
    shown: str
    search: tuple[int | float, ...]
    unit: str
    check: Check | None

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float)

    def verify(self, value: object) -> None:
        """Raise InputError unless value is one that the option can have."""
        if value is None and self.may_be_none:
            return
        if isinstance(value, str) and value in self.words:
            return
        if isinstance(self.kind, tuple):
            one_of(self.name, value, self.kind)
        elif self.kind is bool:
            boolean(self.name, value)
        elif self.check is not None:
            self.check(self.name, value)
        elif self.kind is int:
            whole_number(self.name, value)


def option(
    default: Any,
    help: str,
    *,
    shown: str | None = None,
    search: tuple[int | float, ...] = (),
    unit: str | None = None,
    check: Check | None = None,
) -> Any:
    """A field of a decoder's options (see `Option`). Its annotation is a number, bool or Literal, a
    number or a Literal, or None with one of them. A whole number is at least 1 unless a check says
    otherwise."""
    about = {"help": help, "shown": shown, "search": search, "unit": unit, "check": check}
    return field(default=default, metadata=about)


def max_new_tokens_option() -> Any:
    """The option of that name, which every decoder has."""
    return option(
        None,
        "longest response, in tokens, at least 1, kept exactly",
        shown=f"the task's, for prompts {DEFAULT_MAX_NEW_TOKENS}, less where the context leaves "
        "less",
    )


def block_size_option(default: int | None, shown: str | None = None) -> Any:
    """The option of that name."""
    return option(default, "tokens a block, at least 1", shown=shown)


def early_exit_option(otherwise: str = "decode all") -> Any:
    """The option of that name."""
    return option(
        True,
        f"stop once the first end token and all before it are decoded, or {otherwise}",
        shown="stop",
    )


@cache
def options_of(decoder: type) -> tuple[Option, ...]:
    """The options of a decoder's class, in the order of its fields; fields that were not made by
    `option` are none."""
    # Annotations are text here (from __future__ import annotations) and have to be resolved.
    hints = typing.get_type_hints(decoder)
    return tuple(
        _option(field, hints[field.name]) for field in fields(decoder) if "help" in field.metadata
    )


def default_grid(decoder: type) -> dict[str, tuple[int | float, ...]]:
    """The values that are searched where none are given, by option."""
    return {o.name: o.search for o in options_of(decoder) if o.search}


def _option(field: Any, hint: Any) -> Option:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    others = [p for p in parts if p is not type(None) and get_origin(p) is not Literal]
    kind: Any = others[0] if others else words
    number = kind in (int, float) or (kind is bool and not words)
    if len(others) > 1 or not (number or (words and kind is words)):
        raise InputError(
            f"the option {field.name} of a decoder must be annotated as int, float, bool or "
            f"Literal, a number and a Literal, or one of them and None, got {field.type}"
        )
    about = field.metadata
    shown = _in_words(field.default) if about["shown"] is None else about["shown"]
    unit = about["unit"] or ("N" if kind is int else "SHARE")
    optional = type(None) in parts
    words = () if kind is words else words
    return Option(
        field.name, kind, words, optional, field.default, about["help"], shown, about["search"],
        unit, about["check"],
    )  # fmt: skip


def _in_words(default: object) -> str:
    if default is None:
        return "off"
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


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
        own (`decode.step.sample_seed`). A greedy one has no use for a seed and
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


# What a position of a request sees, by the mask that its model was trained under.

MaskKind = Literal["bidirectional", "block-causal", "absolute block-causal", "causal"]

SDAR_BLOCK_SIZE = 4


def mask_kind(contract: Contract) -> MaskKind:
    """The mask that a model of this contract decodes under. Block-causal blocks begin at the
    prompt's end, absolute ones at position 0."""
    # A D2F student's mask is that of its training, whatever its family's.
    if contract.objective == "d2f" and contract.block_size is not None:
        return "block-causal"
    # SDAR, TraDo: the prompt is cut into blocks too.
    if contract.prompt_rule == "block_causal":
        return "absolute block-causal"
    return "causal" if contract.prompt_rule == "causal" else "bidirectional"


def visible_ends(length: int, prompt_length: int, contract: Contract) -> Ints:
    """Where what each position sees ends, int64 ``[length]``: position p sees ``[0, ends[p])``."""
    kind = mask_kind(contract)
    if kind == "causal":
        return np.arange(1, length + 1)
    if kind == "bidirectional":
        return np.full(length, length, dtype=np.int64)
    if kind == "block-causal":
        assert contract.block_size is not None
        return block_ends(length, prompt_length, contract.block_size)
    return block_ends(length, 0, contract.block_size or SDAR_BLOCK_SIZE)


# Decisions that a session took back, and what became of them.


class Revocations:
    """Takes decided positions of a session back and keeps its counts.

    drafted: tokens decided, again or for the first time. revoked: decisions taken back.
    revoked_changed: how many of these hold another token now than the one taken back; the others
    hold the same one, or none yet.
    """

    def __init__(self, session: MaskedSession):
        self.session = session
        self.taken: list[tuple[int, int]] = []  # position, the token taken back
        session.counts |= {"drafted": 0, "revoked": 0, "revoked_changed": 0}

    def revoke(self, positions: Ints) -> None:
        """Mask decided positions of the sequence again."""
        session = self.session
        assert session.contract.mask_id is not None
        self.taken += [(int(p), int(session.x[p])) for p in positions]
        session.x[positions] = session.contract.mask_id
        # Keys and values stay in the slots: the next forward feeds the mask and overwrites them.
        session.masked[positions] = True

    def count(self) -> None:
        """Bring the counts up to date, once after each step's decisions."""
        x, masked, counts = self.session.x, self.session.masked, self.session.counts
        counts["drafted"] += len(self.session.revealed)
        counts["revoked"] = len(self.taken)
        counts["revoked_changed"] = sum(
            bool(not masked[p] and x[p] != token) for p, token in self.taken
        )
