"""The command that trains and measures variants with several seeds."""

from __future__ import annotations

import json
from math import erf
from pathlib import Path

import numpy as np
import pytest
from small_ablation import ROOT, SMALL, written

import d2f
import decode
from benchmarks.ablation import figures
from benchmarks.ablation.ablation_config import read_ablation
from benchmarks.ablation.ablation_report import render
from benchmarks.ablation.results import Results
from benchmarks.ablation.runs import untrained
from benchmarks.ablation.seed_intervals import difference_interval, effective_number
from d2f.errors import InputError
from d2f.tasks import make_problems
from decode.report import mean_interval, paired
from distill.config import read_config


def test_means_and_intervals():
    """Student's t: 2, 4, 9 have mean 5, deviation sqrt(13), and t(0.975, 2) = 4.3027."""
    mean, low, high = mean_interval([2, 4, 9])
    half = 4.302653 * (13 / 3) ** 0.5
    assert (mean, low, high) == pytest.approx((5, 5 - half, 5 + half))
    assert mean_interval([3])[0] == 3 and str(mean_interval([3])[1]) == "nan"


def test_without_training_a_teacher_is_decoded_as_its_student():
    """No step of a training whose rate is next to nothing is needed for it: a fresh adapter changes
    nothing, the mask is the student's."""
    config = read_config("tiny-d2f", ["--block_size", "8", "--init", "tiny-teacher"])
    model = untrained(config)
    assert (model.contract.objective, model.contract.block_size) == ("d2f", 8)
    questions = [problem.question for problem in make_problems("sudoku", "heldout", 4)]
    found = decode.generate(model, questions, decode.D2F(max_new_tokens=24))
    teacher = d2f.load("tiny-teacher", dtype="float32")
    told = decode.generate(teacher, questions, decode.D2F(max_new_tokens=24, block_size=8))
    assert [(one.raw_tokens, one.calls) for one in found] == [
        (one.raw_tokens, one.calls) for one in told
    ]


ENVIRONMENT = dict.fromkeys(("date", "device", "dtype", "torch", "transformers", "python"), "-")


def row(right: str, decoding: str = "one", **more: object) -> dict[str, object]:
    return {"task": "sudoku", "decoding": decoding, "problems": len(right),
            "right": right.count("1"), "right_by_problem": right, "visible_tokens": 400,
            "forwards": 100, "rows_per_forward": 8, "environment": ENVIRONMENT} | more  # fmt: skip


def run(variant: str, seed: int | None, right: str) -> dict[str, object]:
    trained = {} if seed is None else {"steps": 2, "loss": 0.5, "seconds": 1.0}
    return {"variant": variant, "setting": "", "seed": seed, "rows": [row(right)], **trained}


def report_of(tmp_path: Path, runs: list[dict[str, object]], **changes: object):
    config = read_ablation(written(tmp_path, problems=100, **changes))
    planned = [{"name": r.name, "rows": len(r.decode)} for r in config.plan(tmp_path)]
    return {"title": "Ablation", "command": "-", "config": config.model_dump(mode="json"),
            "planned": planned, "runs": runs}  # fmt: skip


def bits(*wrong: int) -> str:
    return "".join("0" if i in wrong else "1" for i in range(100))


def test_the_report_compares_the_same_problems_at_the_same_seeds(tmp_path):
    runs = [
        run("soft", 1, bits(0, 1)),
        run("hard", 1, bits(0, 2, 3)),
        run("soft", 2, bits(4, 5, 6)),
    ]
    text = render(report_of(tmp_path, runs))
    low, high = (100 * end for end in paired(1, 2, 100))
    # Of seed 2 there is no `hard` yet: what both have is compared, and that is said.
    compared = f"-1.0 (of 1 seeds) | {low:+.1f} to {high:+.1f}"
    assert f"| one | hard | 97 (no 2) | 97.0 | 91.5 to 99.0 | {compared} | 4.00 | 2.0 |" in text
    assert "| one | soft | 98 97 | 97.5 |" in text
    assert "Measured: 3 of 5 runs, 3 of 5 figures" in text


def test_no_interval_of_a_report_has_no_width(tmp_path):
    """Where no problem differs there are still the problems that were not asked."""
    runs = [run(variant, seed, bits()) for seed in (1, 2) for variant in ("soft", "hard")]
    low, high = (100 * end for end in paired(0, 0, 100))
    assert low < -3 and high > 3
    text = render(report_of(tmp_path, runs))
    assert f"| 100 100 | 100.0 | 96.3 to 100.0 | +0.0 | {low:+.1f} to {high:+.1f} |" in text


def test_p_cache_is_of_all_seeds_and_only_where_it_is_counted(tmp_path):
    """400 tokens over 800 rows and 400 over 1,000."""
    runs = [run("soft", 1, bits()), run("soft", 2, bits()), run("hard", 1, bits())]
    assert "p_cache |" not in render(report_of(tmp_path, runs))
    for one, p_cache in zip(runs, (0.5, 0.4), strict=False):
        one["rows"] = [row(bits(), p_cache=p_cache)]
    text = render(report_of(tmp_path, runs))
    assert "| p_cache |" in text
    assert "| 4.00 | 2.0 | 0.44 |" in text and "| 4.00 | 2.0 |  |" in text


def test_an_untrained_model_is_compared_with_its_own_decodings(tmp_path):
    ways = [{"name": n, "decoder": "static", "options": {"block_size": b}}
            for n, b in (("static", 8), ("other", 4))]  # fmt: skip
    entry = {"name": "teacher", "model": "tiny-teacher", "decode": ways,
             "against": {"other": "static"}}  # fmt: skip
    rows = [row(bits(0), "static"), row(bits(1, 2, 3), "other")]
    runs = [{"variant": "teacher", "setting": "", "seed": None, "rows": rows}]
    text = render(report_of(tmp_path, runs, untrained=[entry]))
    low, high = (100 * end for end in paired(1, 3, 100))
    assert (
        f"| other | teacher | 97 | 97.0 | 91.5 to 99.0 | -2.0 | {low:+.1f} to {high:+.1f}" in text
    )


def test_figures_come_from_the_report_alone(tmp_path, capsys):
    right = [("soft", 1, bits(0)), ("hard", 1, bits(1, 2)), ("soft", 2, bits(3))]
    report = report_of(tmp_path, [run(*one) for one in right])
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert figures.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [
        str(tmp_path / f"variants.{suffix}") for suffix in ("png", "svg")
    ]
    # Who is there with how many seeds is in the legend; nothing untrained is measured yet.
    (panel,) = figures._of_variants(Results(report), "")[0]
    assert [series.name for series in panel.series] == ["soft, seeds: 2", "hard, seeds: 1"]
    (point,) = panel.series[0].points
    assert (point.x, point.accuracy) == (4.0, 0.99) and point.low < 0.99 < point.high
    (tmp_path / "report.json").write_text('{"title": "of another kind"}')
    assert figures.main([str(tmp_path)]) == 2
    assert "no report that this" in capsys.readouterr().err


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
        ({"decode": []}, "the decodings of soft: expected at least one, got none"),
        (
            {"untrained": [SMALL["untrained"][0] | {"against": {"static": "wino"}}]},
            "untrained teacher: against must name its decodings, got wino",
        ),
        ({"settings": [{"name": "a"}, {"name": "a"}]}, "names of settings must be distinct"),
        (
            {"settings": [{"name": "a", "set": {"stepz": 3}}]},
            "variant soft a: .*stepz",
        ),
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
    plan = read_ablation(written(tmp_path, variants=variants, untrained=[])).plan(tmp_path)
    assert [run.config.objective.lora.r for run in plan] == [16, 2, 16, 2]


def test_each_variant_is_trained_in_each_setting(tmp_path):
    """A variant's keys are over its setting's; what is not trained comes once a setting."""
    settings = [{"name": "short", "set": {"steps": 3}}, {"name": "long", "set": {"steps": 9}}]
    variants = [
        {"name": "soft"},
        {"name": "one", "set": {"steps": 1}},
        {"name": "none", "trained": False},
    ]
    changes = {"settings": settings, "variants": variants, "untrained": []}
    plan = read_ablation(written(tmp_path, **changes)).plan(tmp_path)
    first = ["soft short-1", "one short-1", "none short", "soft long-1", "one long-1", "none long"]
    later = ["soft short-2", "one short-2", "soft long-2", "one long-2"]
    assert [run.name for run in plan] == [*first, *later]
    assert [run.config.steps for run in plan] == [3, 1, 3, 9, 1, 9, 3, 1, 9, 1]
    assert [run.seed for run in plan] == [1, 1, None, 1, 1, None, 2, 2, 2, 2]


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "ablations").glob("*.yaml")))
def test_the_shipped_ablations_are_configurations(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    found = read_ablation(path)
    assert len(found.seeds) >= 3 and found.split == "heldout"


def test_a_lossless_decoder_stands_beside_static_decoding_under_its_own_cache():
    """FreeDave gives static decoding's tokens under the same cache: beside another it would seem to
    gain or lose."""
    for path in (ROOT / "configs" / "ablations").glob("*.yaml"):
        for entry in read_ablation(path).untrained:
            ways = {one.name: one for one in entry.decode}
            for one in (d for d in entry.decode if d.decoder == "freedave"):
                static = ways[entry.against[one.name]]
                same = {k: v for k, v in one.options.items() if k != "drafts"}
                assert (static.decoder, static.options) == ("static", same), one.name


@pytest.mark.parametrize("spread", [0.0, 0.2])
def test_the_intervals_cover_problems_and_seeds(spread):
    """Made-up students of three seeds, some better on all problems by chance: of 300 such
    ablations of 200 problems, nearly all intervals have the true difference. Over five standard
    deviations below 95 % would be 0.887."""
    rng, covered = np.random.default_rng(0), 0

    def students(harder: np.ndarray, gain: float) -> np.ndarray:
        luck = spread * rng.normal(size=(3, 1))
        return (1 + gain + harder + luck + rng.normal(size=(3, 200)) > 0).astype(float)

    def rate(gain: float) -> float:
        """Of the sum of three normal draws with variances 1, spread^2 and 1."""
        return 0.5 * (1 + erf((1 + gain) / (2 * (2 + spread**2)) ** 0.5))

    for _ in range(300):
        harder = rng.normal(size=200)
        low, high = difference_interval(students(harder, 0.3), students(harder, 0.0))
        covered += low <= rate(0.3) - rate(0.0) <= high
    assert covered / 300 > 0.887


def test_seeds_that_differ_count_for_fewer_problems():
    """And seeds that agree on every problem for no more than one of them."""
    rng = np.random.default_rng(0)
    one = (rng.random((1, 100)) < 0.7).astype(float)
    assert effective_number(one) == 100
    assert effective_number(np.repeat(one, 3, axis=0)) == pytest.approx(100, rel=0.02)
    alone = (rng.random((3, 100)) < 0.7).astype(float)  # no problem is harder than another
    assert 150 < effective_number(alone) <= 300
    apart = np.repeat([[0.0], [1.0], [1.0]], 100, axis=1)
    assert effective_number(apart) < 3
