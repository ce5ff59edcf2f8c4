"""JSON nested deeper than Python goes, wherever a command reads lines: one error that names it."""

import json

import pytest

from d2f.checkpoint import parse
from decode import pipeline, tune
from decode.compare import __main__ as compare

DEEP = "[" * 100_000
ENTRY = {"name": "D2F", "kind": "ours", "model": "tiny-d2f"}


def commands(folder):
    one = ["--problems", "1"]
    config = folder / "compare.yaml"
    keys = {"output": str(folder), "tasks": ["story"], "figures": False, "entries": [ENTRY]}
    config.write_text(json.dumps(keys))
    return {
        "a prompt": (pipeline.main, ["--prompts-file", str(folder / "measurements.jsonl")]),
        "an output": (pipeline.main, [*one, "--output", str(folder / "measurements.jsonl")]),
        "a tuning": (
            tune.main,
            [*one, "--tasks", "story", "--no-figures", "--output", str(folder)],
        ),
        "a comparison": (compare.main, ["--config", str(config)]),
    }


@pytest.mark.parametrize("name", ["a prompt", "an output", "a tuning", "a comparison"])
def test_a_deep_line_is_named(tmp_path, capsys, name):
    (tmp_path / "measurements.jsonl").write_text(DEEP + "\n")
    main, arguments = commands(tmp_path)[name]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert "measurements.jsonl" in error
    assert (tmp_path / "measurements.jsonl").read_text() == DEEP + "\n"


def test_what_python_writes_is_read_where_it_may_be():
    assert parse("[Infinity]", nan=True) == [float("inf")]
    with pytest.raises(ValueError, match="NaN is no number of JSON"):
        parse("NaN")
    with pytest.raises(ValueError, match="nested too deep"):
        parse(DEEP.encode(), nan=True)
