"""The command that trains and measures variants with several seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from benchmarks.ablation.__main__ import main
from benchmarks.ablation.ablation_config import read_ablation
from benchmarks.ablation.ablation_report import render
from d2f.errors import InputError
from decode.reporting.intervals import mean_interval

ROOT = Path(__file__).parent.parent
SMALL = {
    "train": str(ROOT / "configs" / "training" / "tiny-d2f.yaml"),
    "set": {"steps": 2, "data.rows": 2, "data.tasks": {"sudoku": 1}, "lora": {"r": 2}},
    "seeds": [1, 2],
    "variants": [{"name": "soft"}, {"name": "hard", "set": {"distill_target": "hard"}}],
    "untrained": [
        {"name": "teacher", "model": "tiny-teacher",
         "decode": [{"name": "static", "decoder": "static", "options": {"block_size": 8}}]}
    ],
    "decode": [{"name": "one", "decoder": "d2f", "options": {"tau_conf": 0.9}}],
    "tasks": ["sudoku"],
    "problems": 3,
    "against": "soft",
}  # fmt: skip


def written(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "ablation.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return path


def test_every_variant_is_trained_with_every_seed_and_measured(tmp_path, monkeypatch, capsys):
    """A second call trains and measures nothing again, but a setting that is new; other settings of
    the training are refused."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ["--config", str(written(tmp_path, seeds=[1])), "--output", str(tmp_path / "out")]
    words += ["--runs", str(tmp_path / "runs")]
    assert main(words) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [(r["variant"], r["seed"]) for r in report["runs"]] == [("soft", 1), ("hard", 1)]
    assert [r["variant"] for r in report["untrained"]] == ["teacher"]
    for entry in (*report["runs"], *report["untrained"]):
        (row,) = entry["rows"]
        assert row["problems"] == 3 and row["task"] == "sudoku" and row["split"] == "heldout"
    soft, hard = (r["loss"] for r in report["runs"])
    assert soft != hard
    configs = [yaml.safe_load(p.read_text()) for p in (tmp_path / "runs").glob("*/config.yaml")]
    assert {c["distill_target"] for c in configs} == {"soft", "hard"}
    assert {(c["seed"], c["steps"], c["data"]["rows"]) for c in configs} == {(1, 2, 2)}

    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("model.safetensors")}
    rows = [entry["rows"] for entry in (*report["untrained"], *report["runs"])]
    assert main(words) == 0
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [entry["rows"] for entry in (*again["untrained"], *again["runs"])] == rows
    assert before == {p: p.stat().st_mtime_ns for p in before}

    assert main([*words, "--problems", "2"]) == 0
    fewer = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["problems"] for run in fewer["runs"] for row in run["rows"]} == {2}
    assert before == {p: p.stat().st_mtime_ns for p in before}
    assert main([*words, "--set.steps", "3"]) == 2
    assert "holds another run (steps: 2 there, 3 now" in capsys.readouterr().err


def test_means_and_intervals():
    """Student's t: 2, 4, 9 have mean 5, deviation sqrt(13), and t(0.975, 2) = 4.3027."""
    mean, low, high = mean_interval([2, 4, 9])
    half = 4.302653 * (13 / 3) ** 0.5
    assert (mean, low, high) == pytest.approx((5, 5 - half, 5 + half))
    assert mean_interval([3])[0] == 3 and str(mean_interval([3])[1]) == "nan"


def row(right: int, decoding: str = "one") -> dict[str, object]:
    keys = ("date", "device", "dtype", "torch", "transformers", "python")
    return {"task": "sudoku", "decoding": decoding, "problems": 100, "right": right,
            "visible_tokens": 400, "forwards": 100,
            "environment": dict.fromkeys(keys, "-")}  # fmt: skip


def test_the_report_compares_at_the_same_seed(tmp_path):
    """soft 50, 60 against hard 48, 60: hard is 1.0 point lower on average."""
    config = read_ablation(written(tmp_path, problems=100)).model_dump(mode="json")
    rights = {("soft", 1): 50, ("soft", 2): 60, ("hard", 1): 48, ("hard", 2): 60}
    runs = [
        {"variant": v, "seed": s, "steps": 2, "loss": 0.5, "seconds": 1.0, "rows": [row(right)]}
        for (v, s), right in rights.items()
    ]
    report = {
        "title": "Ablation", "command": "-",
        "config": config, "runs": runs, "untrained": [{"variant": "teacher", "rows": [row(70)]}],
    }  # fmt: skip
    text = render(report)
    assert "| one | soft | 55.0 | 0.0 to 100.0 | 50 60 |  |  | 4.00 | 1.0 |" in text
    assert "| one | hard | 54.0 | 0.0 to 100.0 | 48 60 | -1.0 | -13.7 to +11.7 | 4.00 |" in text
    rights[("soft", 2)] = rights[("hard", 2)] = 50
    for run in runs:
        run["rows"] = [row(rights[run["variant"], run["seed"]])]
    text = render(report)  # where all seeds agree, there is still the choice of problems
    assert "| one | soft | 50.0 | 40.4 to 59.6 | 50 50 |" in text
    assert "| one | teacher | 70.0 | 60.4 to 78.1 |  |  |  | 4.00 |" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"against": "other"}, "against must name a variant, got 'other'"),
        ({"tasks": ["chess"]}, "expected a task among .* got 'chess'"),
        ({"seeds": [1, 1]}, "seeds must be distinct"),
        ({"variants": [{"name": "soft", "set": {"stepz": 3}}]}, "variant soft.*stepz"),
        (
            {"decode": [{"name": "x", "decoder": "fast"}]},
            "decode x: decoder must be one of .* got 'fast'",
        ),
        ({"decode": [{"name": "x", "decoder": "d2f", "options": {"no": 2}}]}, "has no option no"),
        ({"decode": [{"name": "x", "decoder": "d2f", "options": {"tau_conf": 7}}]}, "tau_conf"),
        (
            {"decode": [{"name": "x", "decoder": "d2f", "options": {"max_new_tokens": 7}}]},
            "max_new_tokens is no option here",
        ),
        ({"decode": [{"name": "static", "decoder": "d2f"}]}, "one name for two ways"),
        ({"set": {"seed": 4}}, "seed is not for a variant to set"),
        (
            {
                "variants": [{"name": "soft"}],
                "seeds": [1],
                "untrained": [{"name": "soft-1", "model": "x", "decode": SMALL["decode"]}],
            },
            "folders of the runs",
        ),
        ({"train": "none.yaml"}, "none.yaml: cannot be read"),
    ],
)
def test_a_wrong_configuration_is_named_before_any_run(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        read_ablation(written(tmp_path, **changes))


def test_what_one_variant_sets_is_not_set_for_the_next(tmp_path):
    """Also where it sets a key within a section that is set for all."""
    variants = [{"name": "soft", "set": {"lora.r": 16}}, {"name": "hard"}]
    found = read_ablation(written(tmp_path, variants=variants)).trainings(tmp_path)
    assert [config.lora.r for _, config in found] == [16, 2, 16, 2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "ablations").glob("*.yaml")))
def test_the_shipped_ablations_are_configurations(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = read_ablation(path)
    assert len(found.seeds) >= 3 and found.split == "heldout"
