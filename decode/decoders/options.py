"""Options of decoders: dataclass fields that say what they mean, what they may be, what to try.

A decoder declares `tau: float = option(0.9, "confidence from which ...", check=ratio)` once; flags,
configuration keys, their checks, the grids of tuning and the reference page are read from it.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from d2f.errors import InputError
from decode.decoders.checks import boolean, one_of, whole_number

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
