"""Typed configurations: YAML, overrides from the command line, and errors that name the key."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from d2f.device import MOST_THREADS
from d2f.errors import InputError, one_line

# What is wrong with a configuration, in one line: each key by its dotted path, what was expected,
# what came.

MOST_SHOWN = 6

# A key that only one kind of YAML file has at its top, what that file is, and what reads it.
_MARKS = {
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
    "string_type": "text",
    "string_unicode": "Unicode text",
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


def explain(error: ValidationError, values: Any, whole: str = "configuration") -> str:
    """The faults of values in one line. whole: what all of them together are."""
    found: dict[str, dict[str, Any]] = {}
    for fault in error.errors(include_url=False):
        path = _path(fault, values)
        # A union reports a fault for each of its forms; they are one line: expected this or that.
        entry = found.setdefault(path, {"expected": [], "said": [], "input": fault["input"]})
        kind = fault["type"]
        context = {name: _plain(value) for name, value in fault.get("ctx", {}).items()}
        if kind in _EXPECTED:
            entry["expected"].append(_EXPECTED[kind].format(**context))
        elif kind == "extra_forbidden":
            entry["said"].append("there is no such key")
        else:  # from a validator of ours: it says what is wrong in its own words
            entry["said"].append(fault["msg"].removeprefix("Value error, "))
        if kind == "missing":
            entry["input"] = Missing
    # Where one of several forms was meant, what is wrong within it says more than the others.
    above = {parent for path in found for parent in _parents(path)}
    deeper = [path for path in found if path not in above]
    lines = []
    for path in deeper[:MOST_SHOWN]:
        entry = found[path]
        said = list(entry["said"])
        if entry["expected"]:
            came = "nothing" if entry["input"] is Missing else shown(entry["input"])
            either = " or ".join(dict.fromkeys(entry["expected"]))
            said.append(f"expected {either}, got {came}")
        lines.append(f"{path or whole}: {', '.join(said)}")
    more = len(deeper) - len(lines)
    return one_line("; ".join(lines) + (f"; and {more} more" if more else ""))


def _plain(value: Any) -> Any:
    """A bound as people write it: 1 for 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Missing:
    """In place of a value that is not there."""


def shown(value: object) -> str:
    """A value as an error shows it: short, as YAML says it, what is nested by its size."""
    if isinstance(value, dict):
        keys = one_line(", ".join(str(key)[:20] for key in list(value)[:3]))
        return f"a mapping of {len(value)} keys ({keys}{', ...' if len(value) > 3 else ''})"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _path(fault: Any, values: Any) -> str:
    """The dotted path of a fault in the values: without pydantic's names for the members of a
    union, which are no keys."""
    parts, place = [], values
    for part in fault["loc"]:
        if isinstance(place, dict):
            # A key of YAML may be a number. Looked at one by one only then: there may be many.
            key = part
            if key not in place:
                key = next((k for k in place if str(k) == str(part)), Missing)
            if key in place:
                place = place[key]
                parts.append(str(part)[:60])
            continue
        if isinstance(place, list) and isinstance(part, int) and part < len(place):
            place = place[part]
            parts.append(str(part))
    if fault["type"] == "missing":
        parts.append(str(fault["loc"][-1]))
    return ".".join(parts)


def _parents(path: str) -> Iterator[str]:
    """``a`` and ``a.b`` of ``a.b.c``."""
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


# YAML by the core schema of YAML 1.2 (chapter 10.3), as people write it: `1e-4` is a number, `no`,
# `1:30`, `1_000` and a date are text, `012` is 12. What PyYAML's own loaders read is YAML 1.1.
#
# PyYAML parses; what becomes of the nodes is decided here, as the schema is small and a
# configuration
# from somewhere else must not hang or fill the memory: size, depth, and the values that aliases
# multiply are bounded, a key that comes twice is an error, nothing is shared between two aliases.

MOST_BYTES = 2**18
MOST_VALUES = 50_000
DEEPEST = 40

_TAG = "tag:yaml.org,2002:"
_NULL = "null|Null|NULL|~|"
_BOOL = "true|True|TRUE|false|False|FALSE"
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_ODD_FLOAT = r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_SCHEMA = (  # tag, pattern, first characters; the first that matches, so int before float
    ("null", _NULL, "nN~"),
    ("bool", _BOOL, "tTfF"),
    ("int", _INT, "-+0123456789"),
    ("float", f"{_FLOAT}|{_ODD_FLOAT}", "-+.0123456789"),
    ("merge", "<<", "<"),  # no part of the schema, but in wide use
)


def load(text: str, source: str) -> Any:
    """What a YAML document says: None where it is empty, else text, numbers, truth values, lists
    and mappings with keys of text or whole numbers.

    Raises InputError that begins with source and names the line."""
    if len(text) > MOST_BYTES:
        raise InputError(f"{source}: expected at most {MOST_BYTES} bytes of YAML")
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        what = " ".join(filter(None, (error.context, error.problem)))
        said = one_line(what)[:150]
        raise InputError(f"{source}: not YAML: {said}{_line(error.problem_mark)}") from error
    except yaml.reader.ReaderError as error:
        raise InputError(
            f"{source}: not YAML: a character that is not allowed at {error.position}"
        ) from error
    except (ValueError, OverflowError) as error:  # an escape of no character
        raise InputError(f"{source}: not YAML: {error}") from error
    return None if node is None else _Reader(source).value(node)


def dump(values: Any) -> str:
    """YAML that readers of YAML 1.1 and 1.2 take for the same: text that either would take for
    something else is quoted."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    depth = 0

    # PyYAML composes by recursion: what is nested too deep would end in Python's own limit.
    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self.depth += 1
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class _Dumper(yaml.SafeDumper):
    pass


_TOO_DEEP = f"nested more than {DEEPEST} deep"
_Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1; the dumper has both
for _name, _pattern, _first in _SCHEMA:
    _compiled = re.compile(f"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(_TAG + _name, _compiled, [*_first, *([""] * (_name == "null"))])
    _Dumper.add_implicit_resolver(_TAG + _name, _compiled, list(_first))


class _Reader:
    """Turns the nodes of one document into values."""

    def __init__(self, source: str):
        self.source = source
        self.values = 0

    def value(self, node: Node, depth: int = 1) -> Any:
        # Counted as they come out: nine aliases of nine aliases are few nodes and many values.
        self.values += 1
        if self.values > MOST_VALUES:
            raise self._error(f"more than {MOST_VALUES} values, aliases counted each time", node)
        if depth > DEEPEST:  # through aliases; one within itself has no end
            raise self._error(_TOO_DEEP, node)
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
            return [self.value(member, depth + 1) for member in node.value]
        if isinstance(node, MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, depth)
        raise self._error(f"the tag {node.tag} is not supported", node)

    def _mapping(self, node: MappingNode, depth: int) -> dict[str | int, Any]:
        merged: dict[str | int, Any] = {}
        own: dict[str | int, Any] = {}
        names: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                listed = isinstance(value_node, SequenceNode)
                for part in value_node.value if listed else [value_node]:
                    other = self.value(part, depth + 1)
                    if not isinstance(other, dict):
                        raise self._error("<< needs a mapping, or a list of them", key_node)
                    merged = other | merged  # the first of several wins
                continue
            key = self.value(key_node, depth + 1)
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise self._error("a key must be text or a whole number", key_node)
            if str(key) in names:
                raise self._error(f"the key {str(key)[:60]} is there twice", key_node)
            names.add(str(key))
            own[key] = self.value(value_node, depth + 1)
        return merged | own

    def _scalar(self, node: ScalarNode) -> Any:
        text, kind = node.value, node.tag.removeprefix(_TAG)
        try:
            if kind == "null":
                return dict.fromkeys(_NULL.split("|"))[text]
            if kind == "bool":
                return {word: word.lower() == "true" for word in _BOOL.split("|")}[text]
            if kind == "int":
                base = {"0o": 8, "0x": 16}.get(text[:2], 10)
                return int(text[2:] if base != 10 else text, base)
            if kind == "float":
                return float(text.replace(".", "", 1) if text[-1:].isalpha() else text)
        except (KeyError, ValueError) as error:
            raise self._error(f"{text[:40]!r} cannot be read as {kind}", node) from error
        if kind not in ("str", "merge"):
            raise self._error(f"the tag {node.tag} is not supported", node)
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise self._error("text with a NUL or half a surrogate pair", node)
        return text

    def _error(self, what: str, node: Node) -> InputError:
        return InputError(f"{self.source}: {one_line(what)}{_line(node.start_mark)}")


def _line(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f" (line {mark.line + 1})"


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


# The kinds of values that configurations hold, with their bounds: wide enough for any run that can
# be meant, so that a slip of the hand is an error before anything of its size is made.


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
