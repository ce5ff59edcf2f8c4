"""Text made of a row of data, by a template in Jinja's sandbox: ``Question: {{ question }}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from d2f.data_records import BadRecord
from d2f.errors import InputError

# A template is kept to the letter: the line end of its last line is part of the prompt.
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


def columns_of(template: str) -> set[str]:
    """The columns that a template reads. Raises InputError for one that is none."""
    try:
        return set(meta.find_undeclared_variables(_ENVIRONMENT.parse(template)))
    except (TemplateError, RecursionError) as error:
        raise InputError(f"the template {template[:60]!r} cannot be read: {error}") from error


def render(template: str, row: Mapping[str, Any]) -> str:
    """The text of a row. Raises BadRecord."""
    try:
        text = _ENVIRONMENT.from_string(template).render(row)
        text.encode()
    except Exception as error:  # of the template's own arithmetic too
        raise BadRecord(f"the template {template[:60]!r}: {error}") from error
    return text
