"""`d2f tune`: the frontier, the choice and its margin; the command, with made-up measurements where
it does not matter what is decoded."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import d2f
from d2f.errors import InputError
from decode import pipeline
from decode.decoders import DECODERS
from decode.ledger import Ledger
from decode.report import Measurements
from decode.tune import SearchOptions as Goal
from decode.tune import Tuning, choose, difference, frontier, main, margin_of, tune

SMALL = "--tasks story --problems 60 --heldout 45 --repetitions 2 --tau-add 0.1 --tau-act 1".split()
SMALL += ["--no-figures"]
PROBLEMS, TOKENS = 40, 10


def measured(right, speed=1.0):
    """Problems right or not, each of `TOKENS` tokens, at so many tokens per second."""
    count = len(right)
    seconds = np.full(count, TOKENS / speed)
    return Measurements(
        np.array(right, dtype=bool), np.full(count, TOKENS), np.full(count, 2), seconds
    )


def counted(right, problems, speed):
    """The first `right` of the problems right."""
    return measured(np.arange(problems) < right, speed)


def point(one):
    return round(one.tokens_per_second), one.count_right


# The choice.

settings = st.lists(
    st.builds(counted, st.integers(0, PROBLEMS), st.just(PROBLEMS), st.integers(1, 8)),
    min_size=1,
    max_size=10,
)
goals = st.one_of(
    st.builds(Goal, within=st.sampled_from([0, 1, 2.5, 10, 100])),
    st.builds(Goal, min_accuracy=st.floats(0, 1)),
)


@given(settings, goals)
def test_the_frontier_and_the_choice(found, goal):
    """The frontier has no dominated point and misses none; the fastest that is accurate enough is
    chosen."""

    def dominates(a, b):
        return a[0] >= b[0] and a[1] >= b[1] and a != b

    points = list(map(point, found))
    front = [points[i] for i in frontier(found)]
    assert not any(dominates(a, b) for a in points for b in front)
    assert len(set(front)) == len(front) and front == sorted(front, reverse=True)
    assert all(p in front or any(dominates(q, p) for q in points) for p in points)

    chosen, reference, bound = choose(goal, found)
    best = max(one.count_right for one in found)
    assert found[reference].count_right == best
    enough = [one for one in found if one.accuracy >= bound - 1e-9]
    enough = enough or [one for one in found if one.count_right == best]
    assert point(found[chosen])[0] == max(point(one)[0] for one in enough)
    assert found[chosen] in enough


def test_the_bound():
    found = [counted(30, 40, 9), counted(38, 40, 5), counted(39, 40, 4), counted(39, 40, 3)]
    assert choose(Goal(within=2), found)[0] == 2
    assert choose(Goal(within=2.5), found)[0] == 1  # 38 is exactly 2.5 points below 39
    assert choose(Goal(within=2), found)[1] == 3  # the slowest of the most accurate
    assert choose(Goal(min_accuracy=0.75), found)[0] == 0
    assert choose(Goal(min_accuracy=1), found)[0] == 2  # out of reach: the most accurate
    for values in ({"within": 101}, {"within": float("nan")}, {"min_accuracy": 1.5}):
        with pytest.raises(InputError, match=r"must lie in \[0, 1"):
            Goal(**values).check()


def test_the_paired_interval_and_the_margin():
    """Agresti's example has cells 794, 150, 86, 570 (approval of a prime minister, 1600
    asked): the share falls by 4.0 points, 95 % 2.1 to 5.9."""
    first = np.repeat([True, True, False, False], [794, 150, 86, 570])
    second = np.repeat([True, False, True, False], [794, 150, 86, 570])
    share, low, high = difference(measured(first), measured(second))
    assert (share, low, high) == pytest.approx((0.04, 0.021, 0.059), abs=0.0005)
    assert difference(measured(second), measured(first)) == pytest.approx((-share, -high, -low))
    best, worse = counted(95, 100, 1), counted(60, 100, 2)
    share, low, high = margin_of(Goal(within=1), best, best)
    assert share == pytest.approx(0.01) and low < 0 < high
    assert margin_of(Goal(within=10), best, best)[1] > 0
    assert margin_of(Goal(within=1), worse, best)[2] < 0
    low, high = best.interval
    least = margin_of(Goal(min_accuracy=0.9), best, best)
    assert least == pytest.approx((0.05, low - 0.9, high - 0.9))


# The command.


@pytest.fixture
def made_up(monkeypatch):
    """Measurements without decoding: a higher tau_conf is slower, and right on more problems.
    (tau_conf, problems) of each, warm-ups included."""
    calls = []

    def judge(model, decoder, task, problems, *, batch_size):
        calls.append((decoder.tau_conf, len(problems)))
        right = [len(problem.question) % 10 < 10 * decoder.tau_conf for problem in problems]
        return [], measured(right, TOKENS / (0.01 + 0.1 * decoder.tau_conf))

    monkeypatch.setattr("decode.evaluate.decode_and_judge", judge)
    return calls


@pytest.fixture(scope="module")
def model():
    return d2f.load("tiny-d2f", device="cpu")


@pytest.fixture(autouse=True)
def loaded_once(model, monkeypatch):
    """The bundled model, read once. No test changes its weights."""
    real = d2f.load

    def cached(name, *, device=None, **more):
        path = str(getattr(name, "path", name))
        ours = device is None and path in ("tiny-d2f", model.path)
        return replace(model) if ours else real(name, device=device, **more)

    monkeypatch.setattr("d2f.load", cached)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def tried(folder):
    """tau_conf and problems of each setting of the search."""
    rows = report_of(folder)["tasks"][0]["settings"]
    return {row["setting"]["tau_conf"]: row["problems"] for row in rows}


def test_end_to_end(tmp_path, capsys):
    """The bundled model, two settings, a few problems: search, files, and the YAML in use."""
    out = tmp_path / "out"
    arguments = "--tasks sudoku,story --tau-add 0.1 --tau-act 1 --tau-conf 0.5,0.9 --problems 2"
    assert main([str(out), *arguments.split(), "--heldout", "2", "--repetitions", "1"]) == 0
    printed = capsys.readouterr().out
    figures = {f"frontier{of}" for of in (".png", ".svg", "-dark.png", "-dark.svg")}
    files = {"measurements.jsonl", "report.json", "report.md"}
    configs = {"tiny-d2f-story.yaml", "tiny-d2f-sudoku.yaml"}
    assert {path.name for path in out.iterdir() if path.stat().st_size} == figures | files | configs
    options = yaml.safe_load((out / "tiny-d2f-sudoku.yaml").read_text())
    assert list(options) == ["decoder", "block_size", "tau_add", "tau_act", "tau_conf"]
    assert options["decoder"] == "d2f" and options["tau_conf"] in (0.5, 0.9)
    use = f"python -m decode.pipeline --config {out}/tiny-d2f-sudoku.yaml --tasks sudoku"
    assert f"{use}\n" in printed and use in (out / "report.md").read_text()
    assert pipeline.main([*use.split()[3:], "--problems", "1", "--quiet"]) == 0


def test_what_is_chosen_and_measured(tmp_path, made_up, capsys):
    """In the made-up measurements tau_conf is accurate and slow, so the bound decides."""
    arguments = [*SMALL, "--tau-conf", "0.5,0.7,0.9", "--search", "grid"]
    assert main([*arguments, "--within", "25", "--output", str(tmp_path / "a")]) == 0
    (task,) = report_of(tmp_path / "a")["tasks"]
    rows = sorted(task["settings"], key=lambda row: row["setting"]["tau_conf"])
    accuracy = [row["accuracy"] for row in rows]
    assert accuracy == sorted(accuracy) and accuracy[1] >= accuracy[2] - 0.25 > accuracy[0]
    assert all(row["problems"] == 60 and row["compared"] and row["frontier"] for row in rows)
    assert task["chosen"]["tau_conf"] == 0.7
    assert [(row["roles"], row["setting"]["tau_conf"]) for row in task["heldout"]] == [
        (["chosen"], 0.7),
        (["most accurate in the search"], 0.9),
        (["defaults"], 0.9),
    ]  # the defaults have another tau_act
    assert all(row["problems"] == 45 for row in task["heldout"])
    assert all(len(row["tokens_per_second_of_repetitions"]) == 2 for row in task["heldout"])
    heldout = [row["accuracy"] for row in task["heldout"]]
    assert task["margin"]["share"] == pytest.approx(heldout[0] - heldout[1] + 0.25)
    text = (tmp_path / "a" / "tiny-d2f-story.yaml").read_text()
    assert all(part in text for part in (*task["text"], "# held-out: ", "# tuning: "))

    assert main([*arguments, "--min-accuracy", "1", "--output", str(tmp_path / "b")]) == 0
    (task,) = report_of(tmp_path / "b")["tasks"]
    assert task["chosen"]["tau_conf"] == 0.9
    assert "No setting reached the bound of 100.0%" in capsys.readouterr().out


def test_halving_drops_only_what_cannot_reach_the_bound(tmp_path, made_up):
    """Rungs of 20 and 60 problems; by the first 20 a tau_conf of 0.1 is hopeless, 0.8 is not."""
    arguments = [*SMALL, "--tau-conf", "0.1,0.8,0.9", "--within", "5", "--output", str(tmp_path)]
    assert main(arguments) == 0
    # Each part after one problem that is not timed.
    assert made_up[:6] == [(0.1, 1), (0.1, 20), (0.8, 1), (0.8, 20), (0.9, 1), (0.9, 20)]
    assert tried(tmp_path) == {0.1: 20, 0.8: 60, 0.9: 60}
    assert [row["compared"] for row in report_of(tmp_path)["tasks"][0]["settings"]].count(True) == 2


def test_tpe_tries_some_settings(tmp_path, made_up):
    def rungs(**options):
        return [stop for _, stop in Tuning(tasks=["story"], **options).rungs]

    assert rungs() == [23, 67, 200] and rungs(problems=30) == [30]
    assert rungs(eta=10) == [20, 200] and rungs(batch_size=16) == [67, 200]
    taus = ",".join(f"0.{n}" for n in range(50, 99))
    options = ["--search", "tpe", "--trials", "12", "--within", "30", "--tau-conf", taus]
    assert main([*SMALL, *options, "--output", str(tmp_path)]) == 0
    settings = tried(tmp_path)
    assert 6 <= len(settings) <= 12 and set(settings) <= set(map(float, taus.split(",")))


def test_python(tmp_path, made_up, model):
    lists = {"tau_conf": [0.6, 0.9], "tau_add": [0.1], "tau_act": [1.0], "block_size": [8, 16]}
    few = {"problems": 20, "heldout": 20, "repetitions": 1}
    tuning = Tuning(tasks=["sudoku"], lists=lists, search="grid", min_accuracy=0.0, **few)
    report = tune(model, tuning, tmp_path, figures=False)
    (task,) = report["tasks"]
    assert task["chosen"]["tau_conf"] == 0.6 and len(task["settings"]) == 4
    assert (tmp_path / task["config"]).is_file() and report == report_of(tmp_path)


# Cut short, and going on.


@pytest.mark.parametrize("after", [1, 7])
def test_killed_and_resumed_comes_out_the_same(tmp_path, made_up, monkeypatch, capsys, after):
    arguments = [*SMALL, "--tau-conf", "0.5,0.7,0.8,0.9", "--output"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*arguments, str(whole)]) == 0
    written = []

    def die(self, row, write=Ledger.add):
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(row)
        write(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", die)
        assert main([*arguments, str(cut)]) == 130
    ledger = cut / "measurements.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"id": "sto')  # and a line that was cut
    capsys.readouterr()
    assert main([*arguments, str(cut)]) == 0
    assert f"{after} measurements are already in" in capsys.readouterr().out
    assert ledger.read_bytes() == (whole / "measurements.jsonl").read_bytes()
    assert report_of(cut) == report_of(whole)
    made_up.clear()
    assert main([*arguments, str(cut)]) == 0
    assert not made_up and report_of(cut) == report_of(whole)


def test_the_goal_and_a_budget_may_change_over_one_output(tmp_path, made_up, capsys):
    arguments = [*SMALL, "--tau-conf", "0.5,0.7,0.9", "--search", "grid", "--output", str(tmp_path)]
    assert main([*arguments, "--budget", "4"]) == 0  # the first rung takes 20 * 0.24 s
    assert tried(tmp_path) == {0.5: 20, 0.7: 20, 0.9: 20}
    assert "of them on 20 tuning problems. The budget ended" in capsys.readouterr().out
    assert main(arguments) == 0
    assert tried(tmp_path) == {0.5: 60, 0.7: 60, 0.9: 60}
    assert main([*arguments, "--min-accuracy", "0"]) == 0
    assert report_of(tmp_path)["tasks"][0]["chosen"]["tau_conf"] == 0.5
    assert sum(problems == 40 for _, problems in made_up) == 3, "none is measured twice"


# Refused.


def test_another_run_in_the_output(tmp_path, made_up, capsys):
    arguments = [*SMALL, "--tau-conf", "0.5,0.9", "--output", str(tmp_path)]
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for more, message in (
        (["--tau-conf", "0.6"], "grid was {'block_size': ["),
        (["--model", "tiny-wino-plus-d2f"], "weights was '"),
        (["--batch-size", "2"], "batch_size was 1, now 2"),
    ):
        assert main([*arguments, *more]) == 2
        captured = capsys.readouterr()
        assert "is the output of another run: " in captured.err and message in captured.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decoder", "beam"], f"decoder: got 'beam'; expected one of {', '.join(DECODERS)}"),
        (["--steps", "4"], "the decoder d2f has no option steps; of those"),
        (["--decoder", "static"], "the decoder static has no default grid: give lists"),
        (["--decoder", "autoregressive"], "of those that can be searched it has none"),
        (["--decoder", "static", "--steps", "7", "--block-size", "4"], "steps must be a multiple"),
        (["--tau-conf", "0.9,1.2"], "tau_conf must lie in [0, 1], got 1.2"),
        (["--block-size", "8.5"], "--block-size: expected numbers with commas, got '8.5'"),
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--budget", "0"], "budget must lie in (0, "),
        (["--within", "1", "--min-accuracy", "0.9"], "exclude each other"),
        (["--model", "tiny-ar"], "the decoder d2f needs a model with a mask id"),
        (["--problems", "200000"], "count must be at most 100000, got 200000"),
        (["without optuna"], "needs optuna, not installed: pip install 'd2f-toolkit[tune]'"),
    ],
)
def test_bad_arguments(tmp_path, made_up, capsys, monkeypatch, arguments, message):
    if arguments == ["without optuna"]:
        missing = ("optuna", "matplotlib")
        monkeypatch.setattr("d2f.command.find_spec", lambda name: name not in missing or None)
        arguments = []
    out = tmp_path / "out"
    assert main(["--tasks", "sudoku", "--output", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out and not made_up and not out.exists()
