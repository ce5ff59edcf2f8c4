"""Typed configurations: YAML, overrides from the command line, and errors that name the key."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from d2f.device import MOST_THREADS
from d2f.errors import InputError, did_you_mean, one_line

MOST_SHOWN = 6  # faults in an error
MOVED = {"learning_rate": "lr", "rank": "r", "lora_alpha": "alpha", "max_steps": "steps"}
"""Names of other projects' keys, and ours; too far apart to be told by their letters."""
_MARKS = {  # a key that only one kind of file has at its top, what that file is, what reads it
    "objective": ("a training configuration", "distill/train.py"),
    "entries": ("a comparison configuration", "python -m decode.compare"),
    "variants": ("an ablation configuration", "python -m benchmarks.ablation"),
    "judge": ("a task file", "--tasks"),
    "tau_conf": ("a file of decoder options", "python -m decode.pipeline --config"),
    "decoder": ("a file of decoder options", "python -m decode.pipeline --config"),
    "distributed_type": ("a configuration of accelerate", "accelerate launch --config_file"),
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section of keys",
    "literal_error": "{expected}",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "missing": "a value",
    "string_too_short": "text that is not empty",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text like {pattern}",
    "union_tag_invalid": "{discriminator} to be one of {expected_tags}",
    "union_tag_not_found": "the key {discriminator}",
}


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
    needed = [name for name, field in kind.model_fields.items() if field.is_required()]
    refuse_another_kind(values, kind.model_fields, source, f"the keys {', '.join(needed)}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{source}: {explain(error, values, kind=kind)}") from error


def refuse_another_kind(
    values: Mapping[str, Any], known: Collection[str], source: str, here: str
) -> None:
    """Raise InputError where the keys are those of another kind of file than the one that has the
    known ones. here: what was expected."""
    for mark, (what, command) in _MARKS.items():
        if mark in values and mark not in known:
            raise InputError(
                f"{source} looks like {what} (key {mark}), which `{command}` takes: expected {here}"
            )


def explain(
    error: ValidationError,
    values: Any,
    whole: str = "configuration",
    kind: type[BaseModel] | None = None,
) -> str:
    """Put the faults of values into one line. whole: what all of them together are. kind: whose
    keys an unknown one is compared with."""
    found: dict[str, list[str]] = {}
    expected: dict[str, tuple[list[str], Any]] = {}
    for fault in error.errors(include_url=False):
        parts = _keys(fault, values)
        path, what = ".".join(map(str, parts)), fault["type"]
        said = found.setdefault(path, [])
        if what == "extra_forbidden":
            said.append(f"there is no such key{_nearest(kind, parts)}")
        elif what in _EXPECTED:
            # A union has a fault for each of its forms: expected this or that.
            texts, _ = expected.setdefault(path, ([], fault["input"]))
            bounds = {name: _plain(value) for name, value in fault.get("ctx", {}).items()}
            texts.append(_EXPECTED[what].format(**bounds))
            if what == "missing":
                expected[path] = texts, ...
        else:  # from a validator of ours: it says what is wrong in its own words
            said.append(fault["msg"].removeprefix("Value error, "))
    for path, (texts, came) in expected.items():
        came = "nothing" if came is ... else shown(came)
        found[path].append(f"expected {' or '.join(dict.fromkeys(texts))}, got {came}")
    # Where one of several forms was meant, what is wrong within it says more than the others.
    deepest = [path for path in found if not any(p.startswith(f"{path}.") for p in found)]
    lines = [f"{path or whole}: {', '.join(found[path])}" for path in deepest[:MOST_SHOWN]]
    more = len(deepest) - len(lines)
    return one_line("; ".join(lines) + (f"; and {more} more" if more else ""))


def _plain(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def shown(value: object) -> str:
    """Write a value as an error shows it: short, as YAML says it, what is nested by its size."""
    if isinstance(value, dict):
        keys = one_line(", ".join(str(key)[:20] for key in list(value)[:3]))
        return f"a mapping of {len(value)} keys ({keys}{', ...' if len(value) > 3 else ''})"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _keys(fault: Any, values: Any) -> list[str | int]:
    """Return a fault's place without what is no key: pydantic's names for a union's members."""
    found: list[str | int] = []
    for part in fault["loc"]:
        inside = isinstance(values, dict) and part in values
        if inside or (isinstance(values, list) and isinstance(part, int) and part < len(values)):
            values = values[part]
            found.append(part)
    return [*found, fault["loc"][-1]] if fault["type"] == "missing" else found


def _nearest(kind: type[BaseModel] | None, parts: Sequence[str | int]) -> str:
    """Say which key was meant; of a union's sections any one's."""
    sections = [] if kind is None else [kind]
    for part in parts[:-1]:
        if any(str(part) in one.model_fields for one in sections):  # else a place in a list
            sections = [inner for one in sections for inner in _below(one, str(part))]
    known = {name for one in sections for name in one.model_fields}
    *above, name = (str(part) for part in parts)
    moved = MOVED.get(name, "")
    near = f"; did you mean {moved}?" if moved in known else did_you_mean(name, sorted(known))
    return near.replace("mean ", "mean " + "".join(f"{part}." for part in above))


def _below(section: type[BaseModel], key: str) -> Iterator[type[BaseModel]]:
    """List the sections that the value of a key may be."""
    field = section.model_fields.get(key)
    return _sections(field.annotation) if field is not None else iter(())


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


# Overrides: --key value.


def override(
    values: dict[str, Any], arguments: Sequence[str], kind: type[BaseModel] | None = None
) -> None:
    """Put ``--key value`` pairs into values: dots lead into sections, a list's member is named by
    its number or its `name`. A text is taken to the letter, any other value is YAML. kind: of what
    the values are, so that a fault is the flag's and not a file's. Raises InputError."""
    if len(arguments) % 2 or any(not key.startswith("--") for key in arguments[::2]):
        raise InputError(f"overrides must be pairs --key value, got {' '.join(arguments)!r:.200}")
    for flag, text in zip(arguments[::2], arguments[1::2], strict=True):
        field = _field(kind, flag)
        types = set() if field is None else _types(field.annotation)
        if types and types <= {str, NoneType}:
            value = None if text == "null" and NoneType in types else text
        else:
            value = load(text, flag)
            # What YAML takes for text is meant as it stands: here a # begins no comment.
            value = text if isinstance(value, str) else value
        if field is not None:
            try:
                whole: Any = Annotated[field.annotation, field]
                TypeAdapter(whole).validate_python(value)
            except ValidationError as error:
                raise InputError(explain(error, value, flag)) from error
        put(values, flag.removeprefix("--"), value)


def _field(kind: type[BaseModel] | None, flag: str) -> FieldInfo | None:
    """Find the field that a flag puts a value in, None where that is not known before the check.
    Raises InputError for a key that is not there."""
    parts = flag.removeprefix("--").replace("-", "_").split(".")
    annotation: Any = kind
    field = None
    for number, part in enumerate(parts, 1):
        sections = list(_sections(annotation))
        fields = {name: found for one in sections for name, found in one.model_fields.items()}
        if any(get_origin(one) in (list, tuple) for one in _types(annotation)) or not sections:
            return None
        if part not in fields:
            if annotation is not kind and any(one.__subclasses__() for one in sections):
                return None  # of one of several sections, which the check finds out
            raise InputError(f"{flag}: there is no such key{_nearest(kind, parts[:number])}")
        field = fields[part]
        annotation = field.annotation
    return field


def _types(annotation: Any) -> set[Any]:
    """List the types that an annotation allows."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_types, get_args(annotation)))
    return {annotation}


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


def _member(members: list[Any], name: str, flag: str) -> int:
    """Find a list's member by number or `name`; hyphens and underscores are one."""
    if name.isdecimal() and int(name) < len(members):
        return int(name)
    names = [str(m.get("name")) for m in members if isinstance(m, dict)]
    plain = [n.replace("-", "_") for n in names]
    if name not in plain:
        raise InputError(
            f"{flag}: expected one of {', '.join(names)} or a number, got {name!r}"
            f"{did_you_mean(name, names)}"
        )
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
    if values is None:
        raise InputError(f"{source}: expected a mapping of keys, the file is empty")
    if not isinstance(values, dict):
        raise InputError(f"{source}: expected a mapping of keys, got {shown(values)}")
    return values


# The kinds of values that configurations hold, with their bounds: wide enough for any run that can
# be meant, so that a slip of the hand is an error before anything of its size is made.


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"expected printable characters, got {name!r}")
    return name


Switch = bool
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_printable)]


def _no_switch(value: object) -> object:
    if isinstance(value, bool):  # which pydantic would take for 1 or 0
        raise ValueError(f"expected a number, got {str(value).lower()}")
    return value


NO_SWITCH = BeforeValidator(_no_switch)
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
