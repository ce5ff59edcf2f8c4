"""What an option may be: an error names the option, what it may be and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable

from d2f.errors import InputError, repr_of

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
