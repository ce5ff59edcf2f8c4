"""python -m benchmarks.reference_page > docs/reference.md

Prints the reference of all configuration keys, from the models that check them and from the table
of the decoders' options.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks import parser
from benchmarks.ablation import Ablation
from d2f.config import Section
from d2f.tasks.data_task import TaskFile
from d2f.tasks.judges import JUDGES
from decode.compare.config import CompareConfig
from decode.decoders import DECODERS, Decoder
from decode.decoders.base import Option, common_options, options_of
from distill.config import TrainConfig
from distill.objectives import OBJECTIVES

_HEAD = """\
# Reference of all configuration keys

Written by `python -m benchmarks.reference_page > docs/reference.md` from the code that checks them;
a test keeps the two equal. Every key can be given in the file or on the command line, as
`--section.key value`. YAML is read by the core schema of YAML 1.2: `1e-4` is a number, `no` is text
unless the key is a truth value. An unknown key is an error.
"""
_KINDS: tuple[tuple[str, str, type[Section]], ...] = (
    ("Training", "`d2f train --config FILE`", TrainConfig),
    *(
        (f"Objective {name}", f"`objective: {{name: {name}, ...}}`", OBJECTIVES[name].section)
        for name in OBJECTIVES
    ),
    ("Comparison", "`d2f compare --config FILE`", CompareConfig),
    ("Ablation", "`python -m benchmarks.ablation --config FILE`", Ablation),
    ("Task file", "`--tasks FILE`; [Evaluation](evaluation.md#a-task-file) shows one", TaskFile),
    *(
        (f"Judge {name}", f"`judge: {{name: {name}, ...}}` in a task file", judge)
        for name, judge in JUDGES.items()
        if judge.model_fields
    ),
)
_WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "boolean": "true or false",
    "null": "null",
}


def reference() -> str:
    """Write the whole page, Markdown."""
    lines = [_HEAD]
    for title, command, kind in _KINDS:
        schema = kind.model_json_schema()
        lines += [f"## {title}", "", f"Read by {command}.", ""]
        for place, section in _sections(schema, schema.get("$defs", {})):
            lines += [f"### {place}", ""] if place else []
            about = " ".join(section.get("description", "").split())
            lines += [about, ""] if place and about else []
            lines += [*_table(section, schema.get("$defs", {})), ""]
    lines += ["## Decoders", "", *_decoders()]
    return "\n".join(lines).rstrip() + "\n"


def phrase(schema: dict[str, Any], sections: dict[str, Any]) -> str:
    """Put the type of a value and its bounds into words."""
    if "$ref" in schema:
        return "section"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        forms = dict.fromkeys(phrase(one, sections) for one in several)
        return " or ".join(forms)
    if "allOf" in schema:
        return phrase(schema["allOf"][0], sections)
    kind = schema.get("type")
    if kind == "array":
        fixed = schema.get("prefixItems")
        inner = phrase(fixed[0] if fixed else schema.get("items", {}), sections)
        count = f"{len(fixed)} of: " if fixed else ""
        filled = ", not empty" if schema.get("minItems") and not fixed else ""
        return f"list of {count}{inner}{filled}"
    if kind == "object":
        patterned = list(schema.get("patternProperties", {}).values())
        values = patterned[0] if patterned else schema.get("additionalProperties")
        inner = phrase(values, sections) if isinstance(values, dict) else "anything"
        return f"mapping to {inner}" + (", not empty" if schema.get("minProperties") else "")
    if kind is None:
        return "anything"
    return _WORDS[kind] + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    """Bounds of a number, or the pattern of a text; empty where there are none."""
    if schema.get("type") == "string":
        return f" like `{schema['pattern']}`".replace("|", "\\|") if "pattern" in schema else ""
    words = {
        "minimum": "from", "exclusiveMinimum": "above",
        "maximum": "to", "exclusiveMaximum": "below",
    }  # fmt: skip
    parts = [f"{word} {_plain(schema[name])}" for name, word in words.items() if name in schema]
    return f" {' '.join(parts)}" if parts else ""


def _plain(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else str(number)


def _sections(
    schema: dict[str, Any], known: dict[str, Any], place: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the section and those within it, each with its dotted place."""
    yield place, schema
    for name, value in schema["properties"].items():
        listed, targets = _targets(value)
        for target in targets:
            section = known[target]
            inner = f"{place}.{name}" if place else name
            inner += ".N" if listed else ""
            kind = section["properties"].get("kind", {}).get("const")
            yield from _sections(section, known, f"{inner} (kind {kind})" if kind else inner)


def _targets(schema: dict[str, Any]) -> tuple[bool, list[str]]:
    """Find the sections that a value may be, and if it is a list of them."""
    if schema.get("type") == "array" and "items" in schema:
        return True, _targets(schema["items"])[1]
    several = schema.get("anyOf") or schema.get("oneOf") or [schema]
    return False, [one["$ref"].rsplit("/", 1)[1] for one in several if "$ref" in one]


def _table(section: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    yield "| key | what it takes | default | |"
    yield "|---|---|---|---|"
    required = section.get("required", [])
    for name, value in section["properties"].items():
        default = "required" if name in required else _default(value)
        within = known[value["$ref"].rsplit("/", 1)[1]] if "$ref" in value else {}
        about = " ".join((value | {"description": ""} | within | value)["description"].split())
        yield f"| `{name}` | {phrase(value, known)} | {default} | {about} |"


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    if isinstance(default, dict) or "default" not in schema:
        return ""  # a section's own table says its defaults; what is made anew is empty
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    if default is None or isinstance(default, bool):
        return f"`{words[default]}`"
    text = f"`{default}`".replace("'", "").replace("\n", "\\n")
    return text if default != [] else "empty"


def _decoders() -> Iterator[str]:
    yield (
        "In a file for `d2f decode --config`, in `evaluation.options`, in `options` "
        "of a comparison's or an ablation's entries, or as flags with hyphens. `decoder` names one "
        f"of {', '.join(f'`{name}`' for name in DECODERS)}."
    )
    yield ""
    yield "| key | what it takes | decoders | |"
    yield "|---|---|---|---|"
    for name, having in options_by_name(DECODERS.values()).items():
        same = len(having) == len(DECODERS)
        named = "all" if same else ", ".join(kind.name for kind, _ in having)
        about = help_of(having, len(having) if len(having) == 1 else len(DECODERS))
        yield f"| `{name}` | {_option(having[0][1])} | {named} | {about} |"


def options_by_name(
    kinds: Iterable[type[Decoder]],
) -> dict[str, list[tuple[type[Decoder], Option]]]:
    """Return each option of some decoders with every decoder that has it; those of one come
    together, those that all have last."""
    found: dict[str, list[tuple[type[Decoder], Option]]] = {}
    for kind in kinds:
        for option in options_of(kind):
            found.setdefault(option.name, []).append((kind, option))
    last = common_options()
    return {name: found[name] for name in sorted(found, key=lambda name: name in last)}


def help_of(having: Sequence[tuple[type[Decoder], Option]], count: int) -> str:
    """Say what an option means, decoder by decoder where it means or is by default something else.
    count: how many decoders there are; one that all of them have names none."""
    parts = []
    for meaning in dict.fromkeys(option.help for _, option in having):
        same = [(kind, option) for kind, option in having if option.help == meaning]
        defaults: dict[str, list[str]] = {}
        for kind, option in same:
            defaults.setdefault(option.shown, []).append(kind.name)
        shown = "; ".join(
            text if len(defaults) == 1 else f"{', '.join(names)} {text}"
            for text, names in defaults.items()
        )
        who = "" if len(same) == count else f"{', '.join(kind.name for kind, _ in same)}: "
        parts.append(f"{who}{meaning} (default: {shown})")
    return "; ".join(parts)


def _option(option: Option) -> str:
    if isinstance(option.kind, tuple):
        return ", ".join(f"`{word}`" for word in option.kind)
    return {int: "whole number", float: "number", bool: "true or false"}[option.kind]


def main() -> None:
    given = parser(__doc__)
    given.parse_args()
    print(reference(), end="")


if __name__ == "__main__":
    main()
