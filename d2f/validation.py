"""What is wrong with a configuration, in one line: each key by its dotted path, what was expected,
what came."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from d2f.errors import InputError, one_line

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
