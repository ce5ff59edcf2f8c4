"""Show the arguments of a docstring, which are lines `name: what it is`, as a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"^(\w+(?:, \w+)*): ", re.MULTILINE)


class Arguments(griffe.Extension):
    """Rewrite each docstring before mkdocstrings renders it."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            parts = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(listed, parts))


def listed(part: str) -> str:
    """Make a list of a paragraph that begins with an argument."""
    part = re.sub(r"^Args:\n", "", part)
    if not ARGUMENT.match(part):
        return part
    return ARGUMENT.sub(r"- `\1`: ", part)
