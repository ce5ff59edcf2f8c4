"""The command `python -m decode.tune`, with made-up measurements where it does not matter."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from made_up import judge
from rich.console import Console

import d2f
from decode import pipeline
from decode import tune as bench
from decode.decoders import DECODERS
from decode.tune import Goal, Tuning, main, tune

SMALL = "--tasks story --problems 60 --heldout 45 --repetitions 2 --tau-add 0.1 --tau-act 1".split()


@pytest.fixture
def made_up(monkeypatch):
    """Measurements without a model; how many there were, warm-ups included."""
    calls = []

    def count(*arguments, **options):
        calls.append(arguments[1])
        return judge(*arguments, **options)

    monkeypatch.setattr(bench, "decode_and_judge", count)
    return calls


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def jobs(folder):
    lines = (folder / "measurements.jsonl").read_text().splitlines()[1:]
    keys = ("task", "split", "setting", "first", "stop", "repetition")
    return [json.dumps([json.loads(line)[key] for key in keys]) for line in lines]


# What it does


def test_end_to_end(tmp_path, capsys):
    """The bundled model, two settings, a few problems: search, files, and the YAML in use."""
    out = tmp_path / "out"
    arguments = "--tasks sudoku,story --tau-add 0.1 --tau-act 1 --tau-conf 0.5,0.9 --problems 3"
    arguments = [*arguments.split(), "--heldout", "3", "--repetitions", "1", "--output", str(out)]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "frontier.png",
        "frontier.svg",
        "measurements.jsonl",
        "report.json",
        "report.md",
        "tiny-d2f-story.yaml",
        "tiny-d2f-sudoku.yaml",
    ]
    options = yaml.safe_load((out / "tiny-d2f-sudoku.yaml").read_text())
    assert list(options) == ["decoder", "block_size", "tau_add", "tau_act", "tau_conf"]
    assert options["decoder"] == "d2f" and options["tau_conf"] in (0.5, 0.9)
    assert {row["task"]: len(row["heldout"]) for row in report_of(out)["tasks"]}.keys() == {
        "sudoku",
        "story",
    }
    use = f"python -m decode.pipeline --config {out}/tiny-d2f-sudoku.yaml --tasks sudoku"
    assert f"  {use}\n" in printed
    assert pipeline.main([*use.split()[3:], "--problems", "1", "--quiet"]) == 0
    assert use in (out / "report.md").read_text()


def test_an_adapter_named_alone_is_used_as_it_was_tuned(tmp_path, capsys):
    """The line to use it names what the run named, so that the pipeline takes it."""
    words = (
        "--model tiny-d2f-long --tasks sudoku --tau-add 0.1 --tau-act 1 --tau-conf 0.9 --problems 2"
    )
    words = [*words.split(), "--heldout", "2", "--repetitions", "1", "--no-figures"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    chosen = tmp_path / "tiny-d2f-long-sudoku.yaml"
    use = f"python -m decode.pipeline --model tiny-d2f-long --config {chosen}"
    assert f"  {use} --tasks sudoku\n" in capsys.readouterr().out
    assert pipeline.main([*use.split()[3:], "--tasks", "sudoku", "--problems", "1", "--quiet"]) == 0


def test_what_is_chosen_and_measured(tmp_path, made_up, capsys):
    """In the made-up measurements tau_conf is accurate and slow, so the bound decides."""
    arguments = [*SMALL, "--tau-conf", "0.5,0.7,0.9", "--search", "grid", "--no-figures"]
    assert main([*arguments, "--within", "25", "--output", str(tmp_path / "a")]) == 0
    (task,) = report_of(tmp_path / "a")["tasks"]
    rows = task["settings"]
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
    assert task["verdict"]["margin"] == pytest.approx(heldout[0] - heldout[1] + 0.25)
    assert task["verdict"]["holds"] == (heldout[0] >= heldout[1] - 0.25)
    text = (tmp_path / "a" / "tiny-d2f-story.yaml").read_text()
    assert task["verdict"]["text"] in text and "held-out: " in text and "tuning: " in text

    assert main([*arguments, "--min-accuracy", "1", "--output", str(tmp_path / "b")]) == 0
    (task,) = report_of(tmp_path / "b")["tasks"]
    assert task["chosen"]["tau_conf"] == 0.9 and not task["bound_reached"]
    assert not task["verdict"]["holds"]
    assert "No setting reached the bound of 100.0%" in capsys.readouterr().out


def test_the_goal_may_change_over_one_ledger(tmp_path, made_up):
    arguments = [*SMALL, "--tau-conf", "0.5,0.9", "--search", "grid", "--no-figures"]
    arguments += ["--output", str(tmp_path)]
    assert main(arguments) == 0
    before = len(made_up)
    assert main([*arguments, "--min-accuracy", "0"]) == 0
    assert report_of(tmp_path)["tasks"][0]["chosen"]["tau_conf"] == 0.5
    held = {json.loads(job)[1] for job in jobs(tmp_path)[: -(len(made_up) - before)]}
    assert held == {"tuning", "heldout"} and len(set(jobs(tmp_path))) == len(jobs(tmp_path))


def test_python(tmp_path, made_up):
    tuning = Tuning(
        tasks=["sudoku"],
        lists={"tau_conf": [0.6, 0.9], "tau_add": [0.1], "tau_act": [1.0], "block_size": [8, 16]},
        search="grid",
        problems=20,
        heldout=20,
        repetitions=1,
        goal=Goal(min_accuracy=0.0),
    )
    report = tune(d2f.load("tiny-d2f"), tuning, tmp_path, figures=False)
    (outcome,) = report.outcomes
    assert outcome.chosen == {"block_size": 8, "tau_add": 0.1, "tau_act": 1.0, "tau_conf": 0.6}
    assert report.config("sudoku").is_file() and len(outcome.settings) == 4


def test_progress_in_a_terminal(tmp_path, made_up):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"}
    )
    arguments = [*SMALL, "--tau-conf", "0.5,0.9", "--no-figures", "--output", str(tmp_path)]
    assert main(arguments, console) == 0
    shown = console.file.getvalue()
    assert "story, 2 settings on tuning problems 1 to 20" in shown and "tokens/s" in shown


def test_help_does_not_import_torch():
    code = (
        "import sys, decode.tune\n"
        "try: decode.tune.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert done.stdout.startswith("python -m decode.tune --tasks story --output runs/tune\n")


# Cut short


@pytest.mark.parametrize("after", [1, 5, 9, 14])
def test_killed_and_resumed_comes_out_the_same(tmp_path, made_up, monkeypatch, capsys, after):
    arguments = [*SMALL, "--tau-conf", "0.5,0.7,0.8,0.9", "--no-figures", "--output"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*arguments, str(whole)]) == 0
    written = []

    def die(self, measurement, write=bench.TuningLedger.add_done):
        if len(written) == after:
            raise KeyboardInterrupt
        written.append(measurement.job)
        write(self, measurement)

    with monkeypatch.context() as patch:
        patch.setattr(bench.TuningLedger, "add_done", die)
        assert main([*arguments, str(cut)]) == 130
    assert jobs(cut) == jobs(whole)[:after]
    ledger = cut / "measurements.jsonl"
    ledger.write_bytes(ledger.read_bytes() + b'{"task": "sto')  # and a line that was cut
    capsys.readouterr()
    assert main([*arguments, str(cut)]) == 0
    printed = capsys.readouterr().out
    assert "last line was cut short" in printed
    assert f"{after} measurements are already in" in printed
    assert jobs(cut) == jobs(whole)  # none missing, none twice, in the same order
    assert report_of(cut) == report_of(whole)
    made_up.clear()
    assert main([*arguments, str(cut)]) == 0
    assert not made_up and report_of(cut) == report_of(whole)


@pytest.fixture
def clock(monkeypatch):
    """Made-up measurements that take made-up time; the number of them."""
    now, calls = [0.0], []

    def work(*arguments, **options):
        judged = judge(*arguments, **options)
        now[0] += judged.seconds
        calls.append(judged)
        return judged

    monkeypatch.setattr(bench, "decode_and_judge", work)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return calls


def test_a_budget_of_seconds(tmp_path, clock, capsys):
    """Twenty settings of 0.1 s a problem: a look takes 10 s with its warm-ups, then the promising
    ones go on. The report has what each was measured on."""
    arguments = "--tasks story --problems 60 --heldout 9 --repetitions 1 --no-figures".split()
    assert main([*arguments, "--budget", "16", "--output", str(tmp_path)]) == 0
    (task,) = report_of(tmp_path)["tasks"]
    looked = [row["problems"] for row in task["settings"]]
    assert len(looked) == 20 and min(looked) == 4
    search, compared = task["search"], [row for row in task["settings"] if row["compared"]]
    cut = search["cuts"][0]
    assert cut["fitted"] and 2 <= cut["kept"] < 20 and len(compared) <= cut["kept"]
    assert {row["problems"] for row in compared} == {search["compared_problems"]} != {4}
    assert task["chosen"] in [row["setting"] for row in compared]
    printed = capsys.readouterr().out
    assert f"20 settings decoded 4 problems, {cut['kept']} went on, as many as the" in printed
    ledger = [json.loads(line) for line in (tmp_path / "measurements.jsonl").open()][1:]
    assert sum(m["wall"] for m in ledger if m["split"] == "tuning") < 16 + 5


def test_a_budget_killed_and_resumed_comes_out_the_same(tmp_path, clock, monkeypatch):
    arguments = "--tasks story --problems 60 --heldout 9 --repetitions 1 --no-figures".split()
    arguments += ["--budget", "16", "--output"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*arguments, str(whole)]) == 0
    lines = (whole / "measurements.jsonl").read_text().splitlines(keepends=True)
    assert main([*arguments, str(cut)]) == 0
    for after in (3, 22, len(lines) - 1):
        (cut / "measurements.jsonl").write_text("".join(lines[: after + 1]))
        clock.clear()
        assert main([*arguments, str(cut)]) == 0
        assert jobs(cut) == jobs(whole)
        assert report_of(cut)["tasks"][0]["search"] == report_of(whole)["tasks"][0]["search"]
        assert bool(clock) == (after < len(lines) - 1)


def test_a_spent_budget(tmp_path, made_up, capsys):
    arguments = [*SMALL, "--tau-conf", "0.5,0.9", "--no-figures", "--output", str(tmp_path)]
    assert main([*arguments, "--budget", "1e-9"]) == 0
    (task,) = report_of(tmp_path)["tasks"]
    assert task["search"]["budget_spent"] and task["search"]["compared_problems"] == 4
    assert [row["problems"] for row in task["settings"]] == [4, 4]  # a look at each all the same
    assert "tell settings apart only roughly" in capsys.readouterr().out
    assert main(arguments) == 0  # a larger budget goes on
    (task,) = report_of(tmp_path)["tasks"]
    assert not task["search"]["budget_spent"] and task["search"]["compared_problems"] == 60


# Refused


def test_another_run_in_the_output(tmp_path, made_up, capsys):
    arguments = [*SMALL, "--tau-conf", "0.5,0.9", "--no-figures", "--output", str(tmp_path)]
    assert main(arguments) == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for more, message in (
        (["--seed", "1"], "seed was 0, now 1"),
        (["--tau-conf", "0.6"], "grid was {'block_size': ["),
        (["--model", "tiny-teacher"], "grid was {'block_size': ["),
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
        (
            ["--tasks", "chess"],
            "--tasks: expected a task among story, countdown, sudoku",
        ),
        (["--tasks", "story,story"], "--tasks: expected tasks, each once, got 'story,story'"),
        (["--decoder", "beam"], f"decoder must be one of {', '.join(DECODERS)}, got 'beam'"),
        (["--steps", "4"], "the decoder d2f has no option steps; of those that can be searched"),
        (["--decoder", "static", "--tau-add", "0"], "the decoder static has no option tau_add"),
        (["--decoder", "static"], "the decoder static has no default grid: give block_size, steps"),
        (["--decoder", "autoregressive"], "autoregressive has no option that can be searched"),
        (["--decoder", "static", "--steps", "7", "--block-size", "4"], "steps must be a multiple"),
        (["--tau-conf", ""], "tau_conf must have at least one value, got none"),
        (["--tau-conf", "0.9,0.9"], "tau_conf must have each value once, got [0.9, 0.9]"),
        (["--tau-conf", "0.9,1.2"], "tau_conf must lie in [0, 1], got 1.2"),
        (["--tau-conf", "0.9,high"], "argument --tau-conf: invalid list of float value"),
        (["--block-size", "0"], "block_size must be a whole number of at least 1, got 0"),
        (["--block-size", "8.5"], "argument --block-size: invalid list of int value: '8.5'"),
        (["--search", "random"], "argument --search: invalid choice: 'random'"),
        (["--problems", "0"], "problems must be a whole number of at least 1, got 0"),
        (["--heldout", "0"], "heldout must be a whole number of at least 1, got 0"),
        (["--repetitions", "0"], "repetitions must be a whole number of at least 1, got 0"),
        (["--batch-size", "0"], "batch_size must be a whole number of at least 1, got 0"),
        (["--eta", "1"], "eta must be at least 2, got 1"),
        (["--seed", "-1"], "seed must be 0 or more, got -1"),
        (["--budget", "0"], "budget must be more than 0 seconds, got 0.0"),
        (["--within", "-1"], "within must lie in [0, 100] percentage points, got -1.0"),
        (["--min-accuracy", "90"], "min_accuracy must lie in [0, 1], got 90.0"),
        (["--within", "1", "--min-accuracy", "0.9"], "not allowed with argument --within"),
        (["--model", "tiny-ar"], "the decoder d2f needs a model with a mask id"),
        (["--model", "./no/such"], "--model ./no/such: no such folder"),
        (["--device", "meta"], "--device meta: no such device here"),
        (["--problems", "2147483648"], "problems must be at most 1048576, got 2147483648"),
        (["--problems", "200000"], "count must be at most 100000, got 200000"),
        (["--output", ""], "--output is empty: expected a folder"),
        (["--device", "abacus"], "--device abacus: no such device here"),
        (["--nothing"], "unrecognized arguments: --nothing"),
    ],
)
def test_bad_arguments(tmp_path, made_up, capsys, arguments, message):
    out = tmp_path / "out"
    assert main(["--tasks", "sudoku", "--output", str(out), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and message in captured.err
    assert not captured.out and not made_up and not out.exists()


def test_more_problems_than_the_split_has(tmp_path, made_up, monkeypatch, capsys):
    def make(task, split, count, seed):
        raise ValueError(f"count must be at most about 9, got {count}")

    monkeypatch.setattr("d2f.tasks.task.make_problems", make)
    assert main(["--tasks", "sudoku", "--output", str(tmp_path / "out")]) == 2
    message = "error: sudoku, split tuning: count must be at most about 9, got 200"
    assert message in capsys.readouterr().err and not made_up


def test_an_output_that_cannot_be_written(tmp_path, made_up, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    assert main([*SMALL, "--output", str(file)]) == 2
    assert f"--output {file}: no folder can be there" in capsys.readouterr().err
    (tmp_path / "measurements.jsonl").write_text("mine\n")
    assert main([*SMALL, "--output", str(tmp_path)]) == 2
    assert "is not an output of this command; nothing was written" in capsys.readouterr().err
    assert not made_up


def test_without_matplotlib(tmp_path, made_up, monkeypatch, capsys):
    monkeypatch.setattr("decode.cli.find_spec", lambda name: None)
    arguments = [*SMALL, "--tau-conf", "0.9", "--output", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "figures need matplotlib, which is not installed" in capsys.readouterr().err
    assert not made_up and not (tmp_path / "out").exists()
    assert main([*arguments, "--no-figures"]) == 0
    assert not list((tmp_path / "out").glob("frontier*"))
