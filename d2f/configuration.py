"""Typed configurations: YAML, overrides from the command line, and errors that name the key."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from d2f.errors import InputError


class Loader(yaml.SafeLoader):
    """YAML whose truth values are true and false alone, as in YAML 1.2: `mixed_precision: no` is
    the text."""


_BOOL = "tag:yaml.org,2002:bool"
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")


class Section(BaseModel):
    """Frozen; an unknown key or a wrong type is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Config = TypeVar("Config", bound=BaseModel)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises InputError."""
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected a mapping of keys, got {type(values).__name__}")
    return values


def override(values: dict[str, Any], arguments: Sequence[str]) -> None:
    """Put ``--key value`` pairs into values: dots lead into sections, a list's member is named by
    its number or its `name`, values are YAML. Raises InputError."""
    if len(arguments) % 2 or any(not key.startswith("--") for key in arguments[::2]):
        raise InputError(f"overrides must be pairs --key value, got {' '.join(arguments)!r}")
    for flag, text in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            value = yaml.load(text, Loader)
        except yaml.YAMLError as error:
            raise InputError(f"{flag} {text}: not YAML: {error}") from error
        _put(values, flag, value)


def check(kind: type[Config], values: dict[str, Any], source: str) -> Config:
    """A checked configuration. Raises InputError that names each key, what was expected and what
    came."""
    try:
        return kind.model_validate_json(json.dumps(values))
    except (TypeError, ValueError) as error:
        if not isinstance(error, ValidationError):
            raise InputError(f"{source}: a value that JSON does not know: {error}") from error
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'configuration'}: {e['msg']}, got {e['input']!r}"
            for e in error.errors()
        ]
        raise InputError(f"{source}: " + "; ".join(lines)) from error


def _put(values: dict[str, Any], flag: str, value: Any) -> None:
    *sections, last = flag.removeprefix("--").replace("-", "_").split(".")
    place: Any = values
    for section in sections:
        if isinstance(place, list):
            place = place[_member(place, section, flag)]
        else:
            place = place.setdefault(section, {})
        if not isinstance(place, dict | list):
            raise InputError(f"{flag}: {section} is not a section")
    if isinstance(place, list):
        place[_member(place, last, flag)] = value
    else:
        place[last] = value


def _member(members: list[Any], name: str, flag: str) -> int:
    """The place of a list's member by number or `name`; hyphens and underscores are one."""
    if name.isdecimal() and int(name) < len(members):
        return int(name)
    names = [str(m.get("name")) for m in members if isinstance(m, dict)]
    plain = [n.replace("-", "_") for n in names]
    if name not in plain:
        raise InputError(f"{flag}: expected one of {', '.join(names)} or a number, got {name!r}")
    return plain.index(name)
