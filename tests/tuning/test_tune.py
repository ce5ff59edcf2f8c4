"""The command `python -m decode.tune`, with made-up measurements where it does not matter."""

import json

import pytest
import yaml

import d2f
from decode import pipeline
from decode.decoders import DECODERS
from decode.evaluate import Judged
from decode.ledger import Ledger
from decode.step import Result
from decode.tune import Tuning, main, tune

SMALL = "--tasks story --problems 60 --heldout 45 --repetitions 2 --tau-add 0.1 --tau-act 1".split()
SMALL += ["--no-figures"]
TOKENS = 10  # a problem


def judge(model, decoder, task, problems, *, batch_size):
    """In place of `decode_and_judge`: a higher tau_conf is slower, and right on more problems."""
    seconds = 0.01 + 0.1 * decoder.tau_conf
    result = Result([1] * TOKENS, [1] * TOKENS, "", 2, [(1, 0)] * 2, seconds, "end", 5)
    right = [len(problem.question) % 10 < 10 * decoder.tau_conf for problem in problems]
    return Judged([result] * len(problems), right, seconds * len(problems))


@pytest.fixture
def made_up(monkeypatch):
    """Measurements without decoding; (tau_conf, problems) of each, warm-ups included."""
    calls = []

    def count(model, decoder, task, problems, **options):
        calls.append((decoder.tau_conf, len(problems)))
        return judge(model, decoder, task, problems, **options)

    monkeypatch.setattr("decode.evaluate.decode_and_judge", count)
    return calls


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def tried(folder):
    """tau_conf and problems of each setting of the search."""
    rows = report_of(folder)["tasks"][0]["settings"]
    return {row["setting"]["tau_conf"]: row["problems"] for row in rows}


# What it does.


def test_end_to_end(tmp_path, capsys):
    """The bundled model, two settings, a few problems: search, files, and the YAML in use."""
    out = tmp_path / "out"
    arguments = "--tasks sudoku,story --tau-add 0.1 --tau-act 1 --tau-conf 0.5,0.9 --problems 3"
    arguments = [*arguments.split(), "--heldout", "3", "--repetitions", "1", "--output", str(out)]
    assert main(arguments) == 0
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


def test_python(tmp_path, made_up):
    tuning = Tuning(
        tasks=["sudoku"],
        lists={"tau_conf": [0.6, 0.9], "tau_add": [0.1], "tau_act": [1.0], "block_size": [8, 16]},
        search="grid",
        problems=20,
        heldout=20,
        repetitions=1,
        min_accuracy=0.0,
    )
    report = tune(d2f.load("tiny-d2f"), tuning, tmp_path, figures=False)
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
    assert "of them on 20 tuning problems.\nThe budget ended" in capsys.readouterr().out
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
        (["--decoder", "static"], "the decoder static has no default grid: give values"),
        (["--decoder", "autoregressive"], "the options that can be searched: none"),
        (["--decoder", "static", "--steps", "7", "--block-size", "4"], "steps must be a multiple"),
        (["--tau-conf", "0.9,1.2"], "tau_conf must lie in [0, 1], got 1.2"),
        (["--block-size", "8.5"], "--block-size: expected numbers with commas, got '8.5'"),
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--budget", "0"], "budget must lie in (0, "),
        (["--within", "1", "--min-accuracy", "0.9"], "exclude each other"),
        (["--model", "tiny-ar"], "the decoder d2f needs a model with a mask id"),
        (["--problems", "200000"], "count must be at most 100000, got 200000"),
    ],
)
def test_bad_arguments(tmp_path, made_up, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["--tasks", "sudoku", "--output", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out and not made_up and not out.exists()


def test_without_a_library(tmp_path, made_up, monkeypatch, capsys):
    monkeypatch.setattr("decode.cli.find_spec", lambda name: name != "optuna" or None)
    arguments = [*SMALL, "--tau-conf", "0.9", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "needs optuna, not installed: pip install 'd2f-toolkit[tune]'" in capsys.readouterr().err
    assert not made_up and not (tmp_path / "out").exists()
