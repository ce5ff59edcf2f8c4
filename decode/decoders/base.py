"""Define a decoder: options that are checked, and a session for each request
(`decode.decoders.session`)."""

from __future__ import annotations

import abc
import math
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from d2f.contract import Contract
from d2f.errors import InputError, did_you_mean, not_one_of, repr_of
from decode.decoders.session import MOST, MaskKind, Session, mask_kind
from decode.step import sample_seed

DEFAULT_MAX_NEW_TOKENS = 256
DEFAULT_BLOCK_SIZE = 32
MAX = sys.float_info.max
COLDEST = 1e-9
"""Lower temperatures are greedy: the noise of a draw spans 20 temperatures, too little for fp32 to
resolve in logits of size 1, and a division by less than about 1e-38 overflows."""

# A decoder for a model of each mask that the one asked for cannot decode.
OTHERS = {"causal": "wedlm", "bidirectional": "static or d2f"}
OTHERS |= {"block-causal": "block", "absolute block-causal": "block"}
BLOCKWISE_MASKS: tuple[MaskKind, ...] = ("bidirectional", "block-causal", "absolute block-causal")


def whole_number(name: str, value: object, *, least: int = 1, most: int = MOST) -> None:
    """Raise InputError unless value is a whole number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {repr_of(value)}")
    if value > most:
        raise InputError(f"{name} must be at most {most}, got {repr_of(value)}")


def number(
    name: str, value: object, *, least: float = 0.0, most: float = math.inf, above: bool = False
) -> None:
    """Raise InputError unless value is a finite number in [least, most], or with `above` in
    (least, most]."""
    wrong = isinstance(value, bool) or not isinstance(value, int | float)
    if wrong or not (least < value if above else least <= value) or not value <= min(most, MAX):  # type: ignore
        bounds = f"lie in {'(' if above else '['}{least:g}, {most:g}]"
        wanted = f"be {least:g} or more" if most == math.inf else bounds
        hint = ": expected a number" if wrong else ""
        raise InputError(f"{name} must {wanted}, got {repr_of(value)}{hint}")


def boolean(name: str, value: object) -> None:
    """Raise InputError unless value is True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {repr_of(value)}")


def one_of(name: str, value: object, words: Iterable[str]) -> None:
    """Raise InputError unless value is one of the words."""
    words = tuple(words)
    if not isinstance(value, str) or value not in words:
        raise InputError(f"{name}: {not_one_of(value, words)}")


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a decoder: flags, configuration keys, checks, the grids of tuning and the
    reference page are made from it.

    kind: int, float, bool, or a tuple of the words to choose from; may_be_none: None is a value,
        too. Both are from the field's annotation.
    shown: the default in words, for --help.
    search: the values that tuning tries where none are given.
    unit: what stands for a number in --help.
    least, most, above: the bounds of a number; above: least itself is out of bounds.
    """

    name: str
    default: Any
    kind: type | tuple[str, ...]
    may_be_none: bool
    help: str
    shown: str
    unit: str
    search: tuple[int | float, ...] = ()
    least: float | None = None
    most: float | None = None
    above: bool = False

    @property
    def is_number(self) -> bool:
        return self.kind in (int, float)

    def verify(self, value: object) -> None:
        """Raise InputError unless the option may have this value."""
        if value is None and self.may_be_none:
            return
        bounds: dict[str, Any] = {} if self.least is None else {"least": self.least}
        bounds |= {} if self.most is None else {"most": self.most}
        if isinstance(self.kind, tuple):
            one_of(self.name, value, self.kind)
        elif self.kind is bool:
            boolean(self.name, value)
        elif self.kind is int:
            whole_number(self.name, value, **bounds)
        else:
            number(self.name, value, above=self.above, **bounds)


def option(default: Any, help: str, **about: Any) -> Any:
    """Make a field of a decoder's options (see `Option`), annotated as int, float, bool or Literal,
    or as one of them or None. Unless bounds are given a whole number is at least 1, another at
    least 0."""
    return field(default=default, metadata={"option": {"help": help, **about}})


def ratio(default: float, help: str, **more: Any) -> Any:
    """Make an option that is a number in [0, 1]."""
    return option(default, f"{help}, in [0, 1]", most=1.0, **more)


def max_new_tokens_option() -> Any:
    """Make the option of that name, which every decoder has."""
    return option(
        None,
        "longest response, in tokens",
        shown=f"the task's, else what the model was trained on, else {DEFAULT_MAX_NEW_TOKENS}",
    )


def block_size_option(default: int | None, shown: str = "") -> Any:
    return option(default, "tokens a block, at least 1", shown=shown)


def early_exit_option(otherwise: str = "decode all") -> Any:
    return option(
        True,
        f"stop once the first end token and all before it are decoded, or {otherwise}",
        shown="stop",
    )


@cache
def options_of(decoder: type) -> tuple[Option, ...]:
    """List the options of a decoder's class, in the order of its fields. Fields that `option` did
    not make are left out."""
    hints = typing.get_type_hints(decoder)  # annotations are text (from __future__ import ...)
    return tuple(_option(f, hints[f.name]) for f in fields(decoder) if "option" in f.metadata)


def _option(field: Any, hint: Any) -> Option:
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [part for part in parts if part is not type(None)]
    kind: Any = get_args(kinds[0]) if get_origin(kinds[0]) is Literal else kinds[0]
    if len(kinds) != 1 or not (isinstance(kind, tuple) or kind in (int, float, bool)):
        raise InputError(
            f"the option {field.name} of a decoder must be annotated as int, float, bool or "
            f"Literal, or as one of them and None, got {field.type}"
        )
    about = {"shown": "", "unit": "", **field.metadata["option"]}
    about["shown"] = about["shown"] or _in_words(field.default)
    about["unit"] = about["unit"] or ("N" if kind is int else "SHARE")
    none = type(None) in parts
    return Option(name=field.name, default=field.default, kind=kind, may_be_none=none, **about)


def _in_words(default: object) -> str:
    if default is None:
        return "off"
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, int | float) else str(default)


@dataclass(frozen=True, kw_only=True)
class Decoder(abc.ABC):
    """Options that all decoders have. Raises InputError for one out of range.

    temperature: 0, or below `COLDEST`, is greedy.
    seed: the same one gives the same tokens whatever else is in the batch. Prompts and samples that
        share the decoder each get a seed made from it.
    stop: strings that end the text, themselves not in it.
    max_new_tokens: the longest response; None takes what the model was trained on, else 256, less
        where the context leaves less.

    A decoder's class has a name, a summary for --help, labels: what the states of its blocks are
    called where a person reads them, and masks: those of the models that it decodes.
    """

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    labels: ClassVar[Mapping[str, str]] = {}
    masks: ClassVar[tuple[MaskKind, ...]] = get_args(MaskKind)

    temperature: float = option(0.0, "0 is greedy, at least 0", unit="T")
    top_p: float = option(
        1.0,
        "draw from the likeliest tokens that reach this probability together",
        shown="1",
        unit="P",
        most=1.0,
        above=True,
    )
    top_k: int | None = option(None, "draw from the K likeliest tokens", unit="K")
    seed: int = option(
        0,
        "each answer's seed is made from it",
        least=-(2**63),  # the range that torch's generators take
        most=2**64 - 1,
    )
    stop: tuple[str, ...] = ()

    if TYPE_CHECKING:  # each decoder declares it as a field of its own, in its place

        @property
        def max_new_tokens(self) -> int | None: ...

    def __post_init__(self) -> None:
        for one in options_of(type(self)):
            one.verify(getattr(self, one.name))
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not (isinstance(stop, tuple | list) and all(isinstance(s, str) and s for s in stop)):
            raise InputError(f"stop must be non-empty strings, got {repr_of(self.stop)}")
        # The dataclass is frozen; a list, as YAML gives one, becomes a tuple that can be compared.
        object.__setattr__(self, "stop", tuple(stop))

    def __new__(cls, *values: Any, **options: Any) -> Self:
        known = [f.name for f in fields(cls)]
        for name in options.keys() - set(known):
            raise TypeError(f"{cls.__name__} has no option {name!r}{did_you_mean(name, known)}")
        return super().__new__(cls)

    def greedy_only(self, what: str) -> None:
        """Raise InputError unless decoding is greedy, which drafts are checked against."""
        if self.temperature:
            raise InputError(
                f"{what} needs temperature 0: what it drafts is checked against greedy decoding, "
                f"got {repr_of(self.temperature)}"
            )

    @classmethod
    def with_model_defaults(cls, given: Mapping[str, Any], contract: Contract) -> dict[str, Any]:
        """Add options that follow from how the model was trained to those that were given."""
        return dict(given)

    def warning_for(self, contract: Contract) -> str | None:
        """Say why a model may be decoded badly, None where it should not be."""
        return None

    def sampled(self, prompt: int, sample: int) -> Decoder:
        """Return this decoder with the seed of one sample of one of several prompts that share it
        (`decode.step.sample_seed`)."""
        if self.greedy:  # it has no use for a seed
            return self
        return replace(self, seed=sample_seed(self.seed, prompt, sample))

    @property
    def extra_positions(self) -> int:
        """Count the positions after the response that may be fed too."""
        return 0

    @property
    def length(self) -> int:
        """The longest response, in tokens. `decode.engine.prompts.fitted` sets max_new_tokens where
        the model's context leaves less than the default."""
        return self.max_new_tokens or DEFAULT_MAX_NEW_TOKENS

    @property
    def greedy(self) -> bool:
        """Say whether the likeliest tokens are taken, and none is drawn."""
        return self.temperature < COLDEST

    def check(self, contract: Contract) -> None:
        """Raise InputError if this decoder cannot decode a model of that contract."""
        if contract.mask_id is None:
            raise InputError(
                f"the decoder {self.name} needs a model with a mask id, "
                f"the family {contract.family} has none: take autoregressive for it"
            )
        kind = mask_kind(contract)
        if kind not in self.masks:
            needed = dict.fromkeys(mask.removeprefix("absolute ") for mask in self.masks)
            raise InputError(
                f"the decoder {self.name} needs a {' or '.join(needed)} model, the family "
                f"{contract.family} is {kind}: take {OTHERS[kind]} for it"
            )

    @abc.abstractmethod
    def begin(self, prompt: list[int], contract: Contract) -> Session:
        """Begin the session of one request."""


def common_options() -> list[str]:
    """Name the options that every decoder has from `Decoder` itself: the choice of tokens."""
    return [option.name for option in options_of(Decoder)]


def searchable(decoder: type[Decoder]) -> tuple[str, ...]:
    """Name a decoder's own options that are numbers; the length of a response is the task's."""
    left = {*common_options(), "max_new_tokens"}
    return tuple(o.name for o in options_of(decoder) if o.is_number and o.name not in left)


def default_grid(decoder: type) -> dict[str, tuple[int | float, ...]]:
    """Give the values that tuning tries where none are given, by option."""
    return {o.name: o.search for o in options_of(decoder) if o.search}
