"""Entries that stand for several values of an option."""

from __future__ import annotations

import json

import pytest
import yaml

from d2f.errors import InputError
from decode.compare.__main__ import main
from decode.compare.config import read_config
from decode.compare.report import ComparisonReport

SWEPT = {
    "name": "threshold", "kind": "ours", "model": "tiny-teacher", "decoder": "threshold",
    "options": {"block_size": 8}, "sweep": {"tau": [0.5, 0.99]}, "threads": 1,
}  # fmt: skip
STATIC = {
    "name": "static", "kind": "ours", "model": "tiny-teacher", "decoder": "static", "threads": 1,
    "options": {"block_size": 8}, "shares": "threshold tau 0.5",
}  # fmt: skip


def configuration(folder, *entries, **more):
    values = {
        "output": str(folder / "out"), "entries": list(entries), "tasks": ["sudoku"], "problems": 2,
        "accuracy_problems": 3, "repetitions": 1, "warmup": 1,
    }  # fmt: skip
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(values | more))
    return str(path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    assert main(["--config", configuration(folder, SWEPT, STATIC)]) == 0
    return folder / "out"


def test_each_value_is_an_entry_of_one_line(finished):
    report = ComparisonReport.load(finished / "report.json")
    assert [(r.entry, r.series) for r in report.speeds] == [
        ("threshold tau 0.5", "threshold"), ("threshold tau 0.99", "threshold"), ("static", None),
    ]  # fmt: skip
    facts = report.about["entries"]
    assert facts["threshold tau 0.99"]["decoder"]["sudoku"]["tau"] == 0.99
    assert facts["threshold tau 0.99"]["decoder"]["sudoku"]["block_size"] == 8
    bold, shy, static = (row.tokens_per_forward for row in report.speeds)
    assert bold > shy > static, "a lower threshold decodes more tokens a forward"


def test_the_figures_of_a_sweep_are_over_speed_and_over_forwards(finished):
    names = {path.name for path in finished.iterdir()}
    assert {"frontier.png", "frontier.svg", "forwards.png", "forwards.svg"} <= names
    assert "throughput.png" not in names, "there is one concurrency"


def test_what_a_decoder_counts_is_in_the_report(finished):
    values = json.loads((finished / "report.json").read_text())
    runs = values["measurements"]["runs"]
    place = values["measurements"]["columns"].index("counts")
    for run in runs:
        for row in run["answers"]:
            row[place] = {"revoked": 3}
    report = ComparisonReport.load(finished / "report.json")
    assert "revoked" not in report.markdown()
    (finished / "report.json").write_text(json.dumps(values))
    again = ComparisonReport.load(finished / "report.json")
    assert again.speeds[0].counts == {"revoked": 3.0}
    assert "| 1 | static | 3.00 |" in again.markdown()


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([SWEPT | {"sweep": {"tau": []}}], "sweep must have one option with a list of values"),
        ([SWEPT | {"sweep": {"tau": [1], "block_size": [8]}}], "sweep must have one option"),
        ([SWEPT | {"options": [8]}], r"entries\.0\.options: expected a mapping, got a list of 1"),
        ([SWEPT, STATIC | {"shares": "threshold"}], "shares must name an earlier entry"),
        ([SWEPT, STATIC | {"model": "tiny-d2f"}], "its model must be 'tiny-teacher'"),
        ([SWEPT | {"sweep": {"tau": [0.5, 0.5]}}], "two entries have one name"),
    ],
)
def test_a_bad_sweep_is_an_error_before_any_work(tmp_path, entries, said):
    with pytest.raises(InputError, match=said):
        read_config(configuration(tmp_path, *entries))


def test_a_sweep_of_an_option_that_the_decoder_lacks_names_the_entry(tmp_path, capsys):
    bad = SWEPT | {"sweep": {"tau_add": [0.1]}}
    assert main(["--config", configuration(tmp_path, bad)]) == 2
    assert "entry threshold tau_add 0.1" in capsys.readouterr().err
