"""YAML by the core schema of YAML 1.2 (chapter 10.3), as people write it: `1e-4` is a number, `no`,
`1:30`, `1_000` and a date are text, `012` is 12. What PyYAML's own loaders read is YAML 1.1.

PyYAML parses; what becomes of the nodes is decided here, as the schema is small and a configuration
from somewhere else must not hang or fill the memory: size, depth, and the values that aliases
multiply are bounded, a key that comes twice is an error, nothing is shared between two aliases.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from d2f.errors import InputError, one_line

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
