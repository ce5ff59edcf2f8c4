"""`python -m decode.evaluate` on data of one's own: answers kept, gone on from, and counted."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from d2f.tasks import make_problems
from decode.evaluate import main

COUNT = 12


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """Story problems as a user's file, in the working folder."""
    monkeypatch.chdir(tmp_path)
    rows = [
        {"question": p.question, "answer": p.answer} for p in make_problems("story", "train", COUNT)
    ]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path / "mine.jsonl"


def mine(*more: str) -> list[str]:
    return ["--data", "mine.jsonl", "--judge", "numeric", "--split", "all", *more]


def report(folder: str = "out") -> dict:
    return json.loads((Path(folder) / "report.json").read_text())


def answers(folder: str = "out") -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "answers.jsonl").open()][1:]


def test_every_answer_is_kept_and_counted(data, capsys):
    assert main(mine("--output", "out", "--json", "numbers.json")) == 0
    (row,) = report()["rows"]
    kept = answers()
    assert (row["task"], row["problems"], row["split"]) == ("mine", COUNT, "all")
    assert row["right"] == sum(answer["right"] for answer in kept) > COUNT // 2
    assert row["forwards"] == sum(answer["forwards"] for answer in kept)
    assert json.loads(Path("numbers.json").read_text()) == report()
    assert f"{row['right']} of {COUNT} right" in capsys.readouterr().out


def test_a_stopped_run_goes_on_to_the_same_report(data, capsys):
    assert main(mine("--output", "whole")) == 0
    lines = (Path("whole") / "answers.jsonl").read_text().splitlines(keepends=True)
    Path("out").mkdir()
    (Path("out") / "answers.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    assert main(mine("--output", "out")) == 0
    assert f"4 of {COUNT} answers are already in" in capsys.readouterr().err
    timed = {"seconds", "decoded"}
    whole, gone_on = ({k: v for k, v in report(f)["rows"][0].items() if k not in timed}
                      for f in ("whole", "out"))  # fmt: skip
    assert whole == gone_on
    assert report("out")["rows"][0]["decoded"] == COUNT - 4
    # A third time nothing is decoded, and nothing is timed.
    assert main(mine("--output", "out")) == 0
    assert (report()["rows"][0]["decoded"], report()["rows"][0]["seconds"]) == (0, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--judge", "exact"], "tasks was"),
        (["--tau-conf", "0.5"], "options was"),
        (["--samples", "2", "--temperature", "1"], "samples was 1, now 2"),
    ],
)
def test_answers_of_other_settings_are_refused_and_kept(data, capsys, change, message):
    assert main(mine("--output", "out", "--problems", "2")) == 0
    before = Path("out/answers.jsonl").read_bytes()
    assert main(mine("--output", "out", "--problems", "2", *change)) == 2
    said = capsys.readouterr().err
    assert "is the output of another run" in said and message in said
    assert Path("out/answers.jsonl").read_bytes() == before


def test_other_data_under_the_same_name_is_another_run(data, capsys):
    assert main(mine("--output", "out", "--problems", "2")) == 0
    data.write_text(data.read_text().replace("#### ", "#### 1"))  # the same questions
    assert main(mine("--output", "out", "--problems", "2")) == 2
    assert "tasks was" in capsys.readouterr().err


def test_an_edited_judge_is_another_run(data, monkeypatch, capsys):
    """Else its verdicts would stand beside those of the judge that it was."""
    monkeypatch.syspath_prepend(data.parent)
    command = [
        "--data", "mine.jsonl", "--judge", "edited_judge:says", "--split", "all",
        "--problems", "2", "--output", "out",
    ]  # fmt: skip
    for verdict, status in ((True, 0), (True, 0), (False, 2)):
        Path("edited_judge.py").write_text(f"def says(problem, text):\n    return {verdict}\n")
        monkeypatch.delitem(sys.modules, "edited_judge", raising=False)
        importlib.invalidate_caches()
        assert main(command) == status
    assert "tasks was" in capsys.readouterr().err
    assert [answer["right"] for answer in answers()] == [True, True]


def test_samples_have_pass_at_k_and_a_majority(data, capsys):
    more = ["--samples", "3", "--temperature", "0.7", "--pass-at", "1,3", "--problems", "4"]
    assert main(mine("--output", "out", *more)) == 0
    (row,) = report()["rows"]
    kept = answers()
    assert {answer["id"] for answer in kept} == {
        f"mine-{n}#{s}" for n in range(1, 5) for s in (1, 2, 3)
    }
    right = [sum(a["right"] for a in kept if a["id"].startswith(f"mine-{n}#")) for n in range(1, 5)]
    assert row["pass_at"]["1"]["accuracy"] == pytest.approx(row["accuracy"])
    assert row["pass_at"]["3"]["accuracy"] == sum(count > 0 for count in right) / 4
    assert 0 <= row["majority"]["accuracy"] <= 1
    assert "pass@3" in capsys.readouterr().out


def test_a_file_of_options_and_a_length_are_taken_as_by_the_pipeline(data):
    more = ["--config", "tiny-d2f-story", "--max-new-tokens", "8", "--family", "dream"]
    assert main(mine("--output", "out", "--problems", "2", "--stop", "=", *more)) == 0
    assert report()["rows"][0]["max_new_tokens"] == 8
    header = json.loads(Path("out/answers.jsonl").read_text().splitlines()[0])["run"]
    assert header["options"]["stop"] == ["="] and header["options"]["max_new_tokens"] == 8
    assert all("=" not in answer["text"] for answer in answers())


def test_half_of_the_data_is_not_taken_for_all_of_it(data, capsys):
    assert main(["--data", "mine.jsonl", "--judge", "numeric"]) == 0
    said = capsys.readouterr()
    kept = int(said.out.split(" of ")[1].split()[0])
    assert f"the heldout split has {kept} of its {COUNT} problems" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "mine.jsonl"], "--data and --judge go together"),
        (["--data", "mine.jsonl", "--judge", "no"], "--judge: judge must be one of exact"),
        (["--data", "none.jsonl", "--judge", "exact"], "none.jsonl: there is no such file"),
        (mine("--tasks", "story"), "--data is a task of its own"),
        (mine("--problems", "13"), "--problems 13: count must be at most 12"),
        (["--split", "all"], "story has no split all, it has train, tuning, heldout"),
        (["--samples", "2"], "--samples 2: greedy answers of one problem are all the same"),
        (["--samples", "0"], "--samples must lie in [1, 10000], got 0"),
        (mine("--pass-at", "2"), "--pass-at must be whole numbers from 1 to --samples 1"),
        (mine("--pass-at", "x"), "--pass-at must be whole numbers"),
        (mine("--no-merge"), "--no-merge needs --adapter"),
        (mine("--output", "mine.jsonl"), "no folder can be there: it is a file"),
        (["--tasks", "humaneval"], "--allow-code-execution"),
        (mine("--max-new-tokens", "500"), "the model's context is"),
    ],
)
def test_bad_input_is_a_line_before_any_work(data, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("decode.cli.load", lambda _: pytest.fail("loaded"))
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err.splitlines()[0]
    assert not said.out and [p.name for p in data.parent.iterdir()] == ["mine.jsonl"]


def test_code_that_is_run_is_said_before(data, capsys):
    row = {"prompt": "Write f.", "test": "assert f() == 1"}
    data.write_text(json.dumps(row))
    task = "{data: mine.jsonl, splits: {heldout: 1.0}, judge: {name: python, tests: '{{ test }}'}}"
    Path("code.yaml").write_text(task)
    assert main(["--tasks", "code.yaml", "--allow-code-execution", "--max-new-tokens", "16"]) == 0
    said = capsys.readouterr()
    assert "code: the code that the model writes is run here, in a process of its own" in said.err
    assert "0 of 1 right" in said.out
