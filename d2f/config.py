"""Typed configurations: YAML, overrides from the command line, and errors that name the key."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from d2f.device import MOST_THREADS
from d2f.errors import InputError, did_you_mean, not_one_of, one_line

MOST_SHOWN = 6  # faults in an error


class Section(BaseModel):
    """A section of keys: frozen; an unknown key is an error, and so are infinity and NaN. The
    string below a key describes it (docs/reference.md)."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


Config = TypeVar("Config", bound=BaseModel)


def check(kind: type[Config], values: dict[str, Any], source: str) -> Config:
    """Check a configuration. Raises InputError, in one line, that names each key, what was expected
    and what came. source: what the error begins with."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, values, kind=kind)}") from error


def explain(
    error: ValidationError,
    values: Any,
    whole: str = "configuration",
    kind: type[BaseModel] | None = None,
    within: str = "",
) -> str:
    """Put the faults of values into one line, "" for none. whole: what all of them together are.
    kind: whose keys an unknown one is compared with. within: of this key alone (with a dot)."""
    found: dict[str, list[str]] = {}
    expected: dict[str, tuple[list[str], str]] = {}
    for fault in error.errors(include_url=False):
        path, unknown = _path(fault, values), fault["type"] == "extra_forbidden"
        if not f"{path}.".startswith(within) and not (unknown and within.startswith(f"{path}.")):
            continue
        said = found.setdefault(path, [])
        if unknown:
            said.append(f"there is no such key{did_you_mean(within[:-1] or path, _keys(kind))}")
        elif text := _expected(fault["type"], fault["msg"]):
            # A union has a fault for each of its forms: expected this or that.
            came = "nothing" if fault["type"] == "missing" else shown(fault["input"])
            expected.setdefault(path, ([], came))[0].append(text)
        else:  # from a validator of ours: it says what is wrong in its own words
            said.append(fault["msg"].removeprefix("Value error, "))
    for path, (texts, came) in expected.items():
        found[path].append(f"expected {' or '.join(dict.fromkeys(texts))}, got {came}")
    # A key may take several forms: report the fault deepest within one, it says the most.
    deepest = [path for path in found if not any(p.startswith(f"{path}.") for p in found)]
    lines = [f"{path or whole}: {', '.join(found[path])}" for path in deepest[:MOST_SHOWN]]
    more = len(deepest) - len(lines)
    return one_line("; ".join(lines) + (f"; and {more} more" if more else ""))


def _expected(fault: str, message: str) -> str | None:
    """Shorten what pydantic expected."""
    if fault == "missing":
        return "a value"
    if found := re.fullmatch(r"([a-z]+)_(type|parsing|from_float)", fault):
        return _TYPES.get(found[1])
    found = re.fullmatch(r"\w+ should (?:be |have )?(.*?)(?: after validation.*)?", message)
    text = found[1] if found else ""
    for long, short in _SHORTER.items():
        text = text.replace(long, short)
    return text


_SHORTER = {
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater": "more",
    "match pattern": "text like",
}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a mapping",
    "model": "a section of keys",
}


def shown(value: object) -> str:
    """Write a value as an error shows it: short, as YAML says it, what is nested by its size."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys ({', '.join(map(str, value)):.40})"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(fault: Any, values: Any) -> str:
    """Return a fault's place without what is no key: pydantic's names for a union's members."""
    found: list[str | int] = []
    for part in fault["loc"]:
        inside = isinstance(values, dict) and part in values
        if inside or (isinstance(values, list) and isinstance(part, int) and part < len(values)):
            values = values[part]
            found.append(part)
    if fault["type"] == "missing":
        found.append(fault["loc"][-1])
    return ".".join(map(str, found))


def _keys(annotation: Any, above: str = "") -> Iterator[str]:
    """List the keys of a section and of those below it, with dots; of a union's sections all."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield above + name
            yield from _keys(field.annotation, f"{above}{name}.")
    for part in get_args(annotation):
        yield from _keys(part, above)


# Overrides: --key value.


def override(values: dict[str, Any], arguments: Sequence[str], kind: type[BaseModel]) -> None:
    """Put ``--key value`` pairs into values: dots lead into sections, a list's member is named by
    its number or its `name`. A text is taken to the letter, any other value is YAML. kind: of what
    the values are; a fault is the flag's and not a file's. Raises InputError."""
    if len(arguments) % 2 or any(not key.startswith("--") for key in arguments[::2]):
        raise InputError(f"overrides must be pairs --key value, got {' '.join(arguments)!r:.200}")
    for flag, text in zip(arguments[::2], arguments[1::2], strict=True):
        read: Any = text
        with suppress(InputError):
            read = load(text, flag)
        # Take text to the letter: on a command line # begins no comment.
        fault = _fault(values, flag, text if isinstance(read, str) else read, kind)
        if fault and _fault(values, flag, text, kind):  # a folder may have the name 2024
            raise InputError(fault)


def _fault(values: dict[str, Any], flag: str, value: Any, kind: type[BaseModel]) -> str:
    """Put the value of a flag in its place; say what is wrong with it, "" for nothing."""
    key = put(values, flag.removeprefix("--"), value)
    try:
        kind.model_validate(values)
    except ValidationError as error:
        fault = explain(error, values, kind=kind, within=f"{key}.")
        return f"--{fault}" if fault else ""
    return ""


def put(values: dict[str, Any], key: str, value: Any) -> str:
    """Put one value in its place; key: as `override` takes it, without ``--``. Return the key with
    the numbers of lists' members. Raises InputError."""
    *sections, last = key.replace("-", "_").split(".")
    place: Any = values
    path: list[str] = []
    for section in sections:
        at: Any = _member(place, section, key) if isinstance(place, list) else section
        place = place[at] if isinstance(place, list) else place.setdefault(at, {})
        path.append(str(at))
        if not isinstance(place, dict | list):
            raise InputError(one_line(f"--{key}: {section} is not a section"))
    at = _member(place, last, key) if isinstance(place, list) else last
    place[at] = value
    return ".".join([*path, str(at)])


def _member(members: list[Any], name: str, key: str) -> int:
    """Find a list's member by number or `name`; hyphens and underscores are one."""
    if name.isdecimal() and int(name) < len(members):
        return int(name)
    names = [str(m.get("name")) for m in members if isinstance(m, dict)]
    plain = [n.replace("-", "_") for n in names]
    if name not in plain:
        raise InputError(f"--{key}: {not_one_of(name, names)}, or a number")
    return plain.index(name)


# YAML as people write it (core schema of YAML 1.2): 1e-4 is a number, and `no`, 1:30 and a date are
# text, which PyYAML's own loaders read by YAML 1.1.

_SCHEMA = {
    "null": r"null|Null|NULL|~|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+",
    "float": r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
    "merge": r"<<",
}


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        for number, name in enumerate(names):
            if name in names[:number]:
                mark = node.value[number][0].start_mark
                raise yaml.MarkedYAMLError(
                    problem=f"the key {name} is there twice", problem_mark=mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something else than text."""


_Loader.yaml_implicit_resolvers = {}
for _name, _pattern in _SCHEMA.items():
    for _kind in (_Loader, _Dumper):
        if _name != "merge" or _kind is _Loader:
            _kind.add_implicit_resolver(
                f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), None
            )


def load(text: str | bytes, source: str) -> Any:
    """Read a YAML document: None where it is empty. Raises InputError that begins with source and
    names the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise InputError(f"{source}: not YAML: {error.problem}{line}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{source}: not YAML: {error}") from error


def dump(values: Any) -> str:
    """Write YAML that readers of YAML 1.1 and 1.2 take for the same."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises InputError."""
    source = one_line(str(path))
    try:
        values = load(Path(path).read_bytes(), source)
    except OSError as error:
        raise InputError(f"{source}: cannot be read: {error.strerror}") from error
    if not isinstance(values, dict):
        came = "an empty file" if values is None else shown(values)
        raise InputError(f"{source}: expected a mapping of keys, got {came}")
    return values


# The kinds of values that configurations hold, with their bounds: wide enough for any run that can
# be meant, so that a slip of the hand is an error before anything of its size is made.


def _no_switch(value: object) -> object:
    if isinstance(value, bool):  # which pydantic would take for 1 or 0
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


NO_SWITCH = BeforeValidator(_no_switch)
Switch = bool
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(max_length=200, pattern=r"^\P{C}+$")]  # printable
Whole = Annotated[int, Field(ge=0, le=10**9), NO_SWITCH]
Positive = Annotated[int, Field(ge=1, le=10**9), NO_SWITCH]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS), NO_SWITCH]
Seed = Annotated[int, Field(ge=0, lt=2**63), NO_SWITCH]
Tokens = Annotated[int, Field(ge=1, le=2**20), NO_SWITCH]  # lengths of texts, rows and blocks
Problems = Annotated[int, Field(ge=1, le=10**6), NO_SWITCH]
Ratio = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(gt=0, le=1e6)]  # of a sum of several
Weight = Annotated[float, Field(ge=0, le=1e6)]
FILE_SIZE = "^[1-9][0-9]{0,8}[KMGT]B$"
FileSize = Annotated[str, Field(pattern=FILE_SIZE)]  # as 5GB
Seconds = Annotated[float, Field(gt=0, le=1e7)]


def find_attribute(place: str, what: str) -> Any:
    """Import what ``module:attribute`` names; the module may lie in the working folder. Raises
    InputError, which names `what` it is for."""
    module, _, name = place.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # the working folder, after all that is installed
    try:
        return getattr(import_module(module), name)
    except Exception as error:  # whatever the module raises
        raise InputError(
            f"{what} {place}: cannot be imported: {type(error).__name__}: {error}"
        ) from error
