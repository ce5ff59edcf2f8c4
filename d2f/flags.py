"""Flags that commands share, whatever they decode or train."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import FlagCreatePairsOff, arg

from d2f.errors import InputError

Switch = Annotated[bool, FlagCreatePairsOff]
"""A flag that is off unless it is given, without a --no- form."""
Verbose = Annotated[
    Switch,
    arg(
        aliases=["-v"],
        help="show the notices, warnings and progress bars of the libraries underneath, too",
    ),
]


def check_least(options: object, **least: float) -> None:
    """Raise InputError for an option below its least value; None is not given."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and not value >= bound:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least {bound:g}, got {value}")
