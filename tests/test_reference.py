"""docs/reference.md says what the code takes, key by key."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.reference_page import reference
from d2f.tasks.data_task import TaskFile
from d2f.tasks.judges import JUDGES
from decode.compare.config import CompareConfig
from decode.decoders import DECODERS
from distill.config import TrainConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference.md"
KINDS = [TrainConfig, CompareConfig, TaskFile, *JUDGES.values()]


def test_the_page_is_what_the_command_prints():
    text = "run `python -m benchmarks.reference_page > docs/reference.md`"
    assert PAGE.read_text(encoding="utf-8") == reference(), text


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_is_described(kind):
    schema = kind.model_json_schema()
    sections = [schema, *schema.get("$defs", {}).values()]
    lacking = [
        f"{section['title']}.{name}"
        for section in sections
        for name, value in section["properties"].items()
        if not value.get("description") and "$ref" not in value
    ]
    assert lacking == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_has_bounds_on_both_sides(kind):
    """So that a slip of the hand is an error, and not a run of that size."""
    lacking = []

    def look(schema, place):
        if not isinstance(schema, dict):
            return
        if schema.get("type") in ("integer", "number"):
            low = {"minimum", "exclusiveMinimum"} & set(schema)
            high = {"maximum", "exclusiveMaximum"} & set(schema)
            if not (low and high):
                lacking.append(place)
        for name, value in schema.items():
            for i, one in enumerate(value if isinstance(value, list) else [value]):
                look(one, f"{place}.{name}.{i}")

    look(kind.model_json_schema(), kind.__name__)
    assert lacking == []


def test_every_option_of_every_decoder_is_on_the_page():
    """stop is a list, which the command line has as a flag of its own."""
    page = PAGE.read_text(encoding="utf-8")
    lines = page[page.index("## Decoders") :].splitlines()
    there = {line.split("`")[1] for line in lines if line.startswith("| `")}
    assert {f.name for d in DECODERS.values() for f in fields(d)} - there == {"stop"}
