"""The kinds of values that configurations hold, with their bounds: wide enough for any run that can
be meant, so that a slip of the hand is an error before anything of its size is made."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from d2f.cpus import MOST_THREADS


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"expected printable characters, got {name!r}")
    return name


Text = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]
Whole = Annotated[int, Field(ge=0, le=10**9)]
Positive = Annotated[int, Field(ge=1, le=10**9)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Tokens = Annotated[int, Field(ge=1, le=2**20)]  # lengths of texts, rows and blocks
Problems = Annotated[int, Field(ge=1, le=10**6)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1e6)]  # of a sum of several
Weight = Annotated[float, Field(ge=0, le=1e6)]
FILE_SIZE = "^[1-9][0-9]{0,8}[KMGT]B$"
FileSize = Annotated[str, Field(pattern=FILE_SIZE)]  # as 5GB
Seconds = Annotated[float, Field(gt=0, le=1e7)]
