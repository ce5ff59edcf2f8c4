"""`python -m decode.evaluate`: what it counts and keeps, how it goes on, and what it refuses."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from d2f.tasks import find_task, make_problems
from decode.evaluate import line, main, majority, pass_at_k, score
from decode.jobs import Record
from decode.report import wilson

COUNT = 12
STORY = find_task("story")


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


def test_a_stopped_run_goes_on_to_the_report_of_a_whole_one(data, capsys):
    assert main(mine("--output", "whole", "--json", "numbers.json")) == 0
    (row,), kept = report("whole")["rows"], answers("whole")
    assert (row["task"], row["problems"], row["split"]) == ("mine", COUNT, "all")
    assert row["right"] == sum(answer["right"] for answer in kept) > COUNT // 2
    assert row["forwards"] == sum(answer["forwards"] for answer in kept)
    assert json.loads(Path("numbers.json").read_text()) == report("whole")
    assert f"{row['right']} of {COUNT} right" in capsys.readouterr().out
    lines = (Path("whole") / "answers.jsonl").read_text().splitlines(keepends=True)
    Path("out").mkdir()
    (Path("out") / "answers.jsonl").write_text("".join(lines[:5]) + lines[5][:9])
    assert main(mine("--output", "out")) == 0
    said = capsys.readouterr().err
    assert "last line was cut short" in said and f"4 of {COUNT} answers are already in" in said
    (resumed,) = report()["rows"]
    assert resumed["decoded"] == COUNT - 4
    timed = {"seconds": 0, "decoded": 0}
    assert resumed | timed == row | timed
    # A third time nothing is decoded, and nothing is timed.
    assert main(mine("--output", "out")) == 0
    assert (report()["rows"][0]["decoded"], report()["rows"][0]["seconds"]) == (0, None)


def test_answers_of_other_settings_data_or_judges_are_refused_and_kept(data, monkeypatch, capsys):
    monkeypatch.syspath_prepend(data.parent)
    judged = ["--data", "mine.jsonl", "--judge", "edited_judge:says", "--split", "all"]

    def verdict(value: bool) -> None:
        Path("edited_judge.py").write_text(f"def says(problem, text):\n    return {value}\n")
        monkeypatch.delitem(sys.modules, "edited_judge", raising=False)
        importlib.invalidate_caches()

    verdict(True)
    small = ["--output", "out", "--problems", "2"]
    assert main([*judged, *small]) == main([*judged, *small]) == 0
    before = Path("out/answers.jsonl").read_bytes()
    for change, message in (
        (["--judge", "exact"], "tasks was"),
        (["--tau-conf", "0.5"], "options was"),
        (["--end-ids", "2,3"], "end_ids was"),
        (["--mask-id", "5"], "mask_id was"),
        (["--samples", "2", "--temperature", "1"], "samples was 1, now 2"),
    ):
        assert main([*judged, *small, *change]) == 2
        said = capsys.readouterr().err
        assert "is the output of another run" in said and message in said
    verdict(False)  # else its verdicts would stand beside those of the judge that it was
    assert main([*judged, *small]) == 2 and "tasks was" in capsys.readouterr().err
    verdict(True)
    data.write_text(data.read_text().replace("#### ", "#### 1"))  # the same questions
    assert main([*judged, *small]) == 2 and "tasks was" in capsys.readouterr().err
    assert Path("out/answers.jsonl").read_bytes() == before


def test_samples_have_pass_at_k_and_a_majority(data, capsys):
    more = ["--samples", "3", "--temperature", "0.7", "--pass-at", "1,3", "--problems", "4"]
    assert main(mine("--output", "out", *more)) == 0
    (row,), kept = report()["rows"], answers()
    names = [[f"mine-{n}#{s}" for s in (1, 2, 3)] for n in range(1, 5)]
    assert {answer["id"] for answer in kept} == {name for its in names for name in its}
    right = [sum(a["right"] for a in kept if a["id"] in its) for its in names]
    assert row["pass_at"]["1"]["accuracy"] == pytest.approx(row["accuracy"])
    assert row["pass_at"]["3"]["accuracy"] == sum(count > 0 for count in right) / 4
    assert 0 <= row["majority"]["accuracy"] <= 1
    assert "pass@3" in capsys.readouterr().out


def test_what_a_user_should_know_is_said_before(data, capsys):
    assert main(["--data", "mine.jsonl", "--judge", "numeric"]) == 0
    said = capsys.readouterr()
    kept = int(said.out.split(" of ")[1].split()[0])
    assert f"the heldout split has {kept} of its {COUNT} problems" in said.err
    data.write_text(json.dumps({"prompt": "Write f.", "test": "assert f() == 1"}))
    task = "{data: mine.jsonl, splits: {heldout: 1.0}, judge: {name: python, tests: '{{ test }}'}}"
    Path("code.yaml").write_text(task)
    assert main(["--tasks", "code.yaml", "--allow-code-execution", "--max-new-tokens", "16"]) == 0
    said = capsys.readouterr()
    assert "code: the code that the model writes is run here, in a process of its own" in said.err
    assert "0 of 1 right" in said.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "no/such/folder/x.json"], "folder"),
        (["--data", "mine.jsonl", "--judge", "no"], "--judge: no such judge: got 'no'"),
        (["--data", "none.jsonl", "--judge", "exact"], "none.jsonl: cannot be read: No such file"),
        (mine("--tasks", "story"), "--data is a task of its own"),
        (mine("--problems", "13"), "--problems 13: count must be at most 12"),
        (["--split", "all"], "story has no split all, it has train, tuning, heldout"),
        (["--samples", "2"], "--samples 2: greedy answers of one problem are all the same"),
        (mine("--output", "mine.jsonl"), "expected a folder that can be written"),
        (["--tasks", "humaneval"], "--allow-code-execution"),
        (mine("--max-new-tokens", "500"), "the model's context is"),
    ],
)
def test_bad_input_is_a_line_before_any_work(data, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("decode.workers.load", lambda _: pytest.fail("loaded"))
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and message in said.err.splitlines()[0]
    assert not said.out and [p.name for p in data.parent.iterdir()] == ["mine.jsonl"]


def record(name: str, text: str, right: bool) -> Record:
    return Record(
        id=name, task="story", question="?", text=text, right=right, finish_reason="end",
        prompt_tokens=3, max_new_tokens=8, forwards=2, rows=7, counts={"revoked": 1}, seconds=0.5,
        tokens=[1, 2, 3], raw_tokens=[1, 2, 3, 0],
    )  # fmt: skip


@given(verdicts=st.lists(st.booleans(), min_size=1, max_size=7), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(verdicts, data):
    k = data.draw(st.integers(1, len(verdicts)))
    subsets = list(combinations(verdicts, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(verdicts), sum(verdicts), k) == pytest.approx(share)


def test_one_response_a_problem_is_counted_as_a_share():
    found = score(STORY, [record(str(i), "#### 7", i < 3) for i in range(4)])
    assert (found["right"], found["problems"], found["accuracy"]) == (3, 4, 0.75)
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson(3, 4)
    assert (found["visible_tokens"], found["forwards"]) == (12, 8)
    assert (found["tokens_per_forward"], found["rows_per_forward"]) == (1.5, 3.5)
    assert found["counts"] == {"revoked": 4} and "majority" not in found


def test_samples_of_one_problem_are_one_problem_in_the_interval():
    """Four samples of one problem say no more of other problems than one does."""
    records = [record(str(i), "#### 7", True) for i in range(8)]
    found = score(STORY, records, samples=4, pass_at=[1, 4])
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson(2, 2)
    assert found["pass_at"]["4"] == {k: found[k] for k in found["pass_at"]["4"]}
    said = line(found | {"seconds": None})
    assert "8 of 8 right" in said and "pass@4 100.0%" in said and "majority of 4" in said
    # Answers of countdown cannot be counted: any expression may be right.
    assert "majority" not in score(find_task("countdown"), records, samples=2)


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (["#### 7", "#### 8", "so\n#### 7"], True),
        (["#### 8", "#### 8", "#### 7"], False),
        (["#### 7", "#### 8"], True),  # equally many: the first
        (["#### 8", "#### 7"], False),
        (["nothing", "none", "#### 7"], True),  # who says nothing has no vote
        (["nothing", "none"], None),
    ],
)
def test_the_majority_is_of_answers_and_not_of_texts(texts, right):
    group = [record(str(i), text, text.endswith("#### 7")) for i, text in enumerate(texts)]
    assert majority(STORY, group) is right
