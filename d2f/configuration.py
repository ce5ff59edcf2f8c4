"""Typed configurations: YAML, overrides from the command line, and errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from d2f.errors import InputError, one_line
from d2f.validation import explain, refuse_another_kind, shown
from d2f.yaml_core import MOST_BYTES, load


def _switch(value: object) -> object:
    """What older YAML says for true and false is meant so where a key is a truth value."""
    words = {"yes": True, "on": True, "no": False, "off": False}
    return words.get(value.lower(), value) if isinstance(value, str) else value


Switch = Annotated[bool, BeforeValidator(_switch)]


class Section(BaseModel):
    """Frozen; an unknown key, a wrong type and a number that is not finite are errors. What stands
    below a key describes it (docs/reference.md)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


Config = TypeVar("Config", bound=BaseModel)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InputError."""
    source = one_line(str(path))
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)  # one more than allowed tells that it is too long
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise InputError(f"{source}: expected at most {MOST_BYTES} bytes of YAML")
    try:
        text = content.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: not YAML: not UTF-8, {error.reason}") from error
    values = load(text, source)
    if values is None:
        raise InputError(f"{source}: expected a mapping of keys, the file is empty")
    if not isinstance(values, dict):
        raise InputError(f"{source}: expected a mapping of keys, got {shown(values)}")
    return values


def override(values: dict[str, Any], arguments: Sequence[str]) -> None:
    """Put ``--key value`` pairs into values: dots lead into sections, a list's member is named by
    its number or its `name`, values are YAML. Raises InputError."""
    if len(arguments) % 2 or any(not key.startswith("--") for key in arguments[::2]):
        raise InputError(f"overrides must be pairs --key value, got {' '.join(arguments)!r:.200}")
    for flag, text in zip(arguments[::2], arguments[1::2], strict=True):
        put(values, flag.removeprefix("--"), load(text, one_line(f"{flag} {text:.60}")))


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Put one value in its place; key: as `override` takes it, without ``--``. Raises
    InputError."""
    flag = f"--{key}"
    *sections, last = key.replace("-", "_").split(".")
    place: Any = values
    for section in sections:
        if isinstance(place, list):
            place = place[_member(place, section, flag)]
        else:
            place = place.setdefault(section, {})
        if not isinstance(place, dict | list):
            raise InputError(one_line(f"{flag}: {section} is not a section"))
    if isinstance(place, list):
        place[_member(place, last, flag)] = value
    else:
        place[last] = value


def check(kind: type[Config], values: dict[str, Any], source: str) -> Config:
    """A checked configuration. Raises InputError, in one line, that names each key, what was
    expected and what came."""
    refuse_another_kind(values, kind.model_fields, source, f"the keys {_some(kind)}")
    _refuse_endless(values, source)
    try:
        # By way of JSON: in strict mode pydantic takes a list for a tuple only from there.
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, values)}") from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: a value that JSON does not know: {error}") from error


def _refuse_endless(values: Any, source: str, path: str = "") -> None:
    """Raise InputError for .inf and .nan, also where a key takes anything."""
    if isinstance(values, float) and not isfinite(values):
        raise InputError(f"{source}: {one_line(path)}: expected a finite number, got {values}")
    members: Any = values.items() if isinstance(values, dict) else ()
    for key, value in enumerate(values) if isinstance(values, list) else members:
        _refuse_endless(value, source, f"{path}.{key!s:.60}" if path else f"{key!s:.60}")


def _some(kind: type[BaseModel]) -> str:
    """Keys that a configuration must have."""
    return ", ".join(name for name, field in kind.model_fields.items() if field.is_required())


def _member(members: list[Any], name: str, flag: str) -> int:
    """The place of a list's member by number or `name`; hyphens and underscores are one."""
    if name.isdecimal() and int(name) < len(members):
        return int(name)
    names = [str(m.get("name")) for m in members if isinstance(m, dict)]
    plain = [n.replace("-", "_") for n in names]
    if name not in plain:
        named = one_line(", ".join(names))
        raise InputError(f"{flag}: expected one of {named} or a number, got {name!r}")
    return plain.index(name)
