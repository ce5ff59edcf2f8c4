"""Local files in place of the splits of a task's data set: which rows they give, what identifies
them, and what is said of one that is wrong or missing."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from d2f.config import dump
from d2f.errors import InputError
from d2f.tasks import find_task, find_tasks
from decode import evaluate
from decode.compare.config import make_workloads
from decode.compare.config import read_config as read_comparison
from decode.pipeline import main as pipeline

ROWS = [{"question": f"What is {i}+1?", "answer": f"#### {i + 1}"} for i in range(40)]
MBPP = [
    {
        "task_id": i, "text": f"Return {i}.", "code": f"def f():\n    return {i}",
        "test_list": [f"assert f() == {i}"], "test_setup_code": "",
    }
    for i in range(1, 31)
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("test.jsonl", ROWS[:10])
    write("train.jsonl", ROWS[10:])
    write("mbpp.jsonl", MBPP)


def write(name: str, rows: list) -> str:
    # A blank line is no row, also where a part is counted.
    Path(name).write_text("\n" + "\n\n".join(map(json.dumps, rows)))
    return name


def questions(task, split: str) -> list[str]:
    return sorted(problem.row["question"] for problem in task.problems(split, None))


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_each_split_is_read_from_its_file(ending):
    made = datasets.Dataset.from_list(ROWS)
    {"jsonl": made.to_json, "parquet": made.to_parquet, "csv": made.to_csv}[ending](f"a.{ending}")
    files = {"test": f"a.{ending}[:10]", "train": f"a.{ending}[10:]"}
    task = find_task("gsm8k-chat", data_files=files)
    assert questions(task, "heldout") == sorted(row["question"] for row in ROWS[:10])
    shown = [turn["content"] for turn in task.problems("heldout", 1)[0].prompt]
    assert set(shown[1:-1:2]) <= {row["answer"] for row in ROWS[10:]}
    assert len(shown) == 2 * 4 + 1


def test_a_split_keeps_its_part_of_the_part_that_was_given():
    """MBPP as one file: tasks 2 to 4 are the examples, as on the hub."""
    files = {"test": "mbpp.jsonl[10:20]", "prompt": "mbpp.jsonl[:10]"}
    task = find_task("mbpp-chat", allow_code_execution=True, data_files=files)
    problems = task.problems("heldout", None)
    assert sorted(problem.row["task_id"] for problem in problems) == list(range(11, 21))
    shown = [turn["content"] for turn in problems[0].prompt[1:-1:2]]
    assert shown == [f"{row['code']}\n[DONE]" for row in MBPP[1:4]]
    assert task.problems("train", None)[0].row["task_id"] in range(2, 11)
    halves = {"train": "train.jsonl[-50%:]"}
    Path("mine.yaml").write_text(
        dump({"data": "a/b", "splits": {"heldout": "train[1:3]"}, "judge": "numeric"})
    )
    found = questions(find_task("mine.yaml", data_files=halves), "heldout")
    assert found == [row["question"] for row in ROWS[26:28]]


def test_shares_are_of_the_file_given_for_train():
    Path("mine.yaml").write_text(dump({"data": "owner/set", "judge": "numeric"}))
    task = find_task("mine.yaml", data_files={"train": "train.jsonl"})
    both = questions(task, "tuning") + questions(task, "heldout")
    assert sorted(both) == sorted(row["question"] for row in ROWS[10:])


def test_the_identity_is_that_of_the_rows_and_of_the_split_that_has_them():
    write("copy.jsonl", ROWS[:10])
    write("other.jsonl", [*ROWS[:9], ROWS[0]])
    test, train = "test.jsonl", "train.jsonl"
    different = [
        {"test": test, "train": train},
        {"test": train, "train": test},
        {"test": "test.jsonl[:9]", "train": train},
        {"test": "other.jsonl", "train": train},
        {"test": test},
    ]
    found = [find_task("gsm8k-chat", data_files=files).identity for files in different]
    assert len(set(found)) == len(found)
    again = find_task("gsm8k-chat", data_files={"train": train, "test": "copy.jsonl"})
    assert again.identity == found[0]


def test_a_command_evaluates_them(capsys):
    words = "--tasks wino-gsm8k --data-files test=test.jsonl --problems 2 --max-new-tokens 8"
    assert evaluate.main([*words.split(), "--output", "out"]) == 0
    assert "of 2 right" in capsys.readouterr().out
    write("test.jsonl", ROWS[1:11])
    assert evaluate.main([*words.split(), "--output", "out"]) == 2
    assert "is the output of another run" in capsys.readouterr().err
    (task,) = evaluate.parse(words.split()).chosen
    assert task.words[2:] == ("--data-files", "test=test.jsonl")  # what `d2f tune` tells to use


@pytest.mark.parametrize(
    ("tasks", "files", "message"),
    [
        ("gsm8k-chat", "test=test.jsonl",
         "gsm8k-chat: --data-files needs train=PATH too (its few-shot examples)"),
        ("gsm8k-chat", "train=train.jsonl", "--data-files needs test=PATH too (its problems)"),
        ("gsm8k-chat", "tset=test.jsonl,train=train.jsonl",
         "gsm8k-chat: --data-files: got 'tset'; did you mean test?; expected one of test, train"),
        ("gsm8k-cot", "test=none.jsonl", "gsm8k-cot: none.jsonl: cannot be read: No such file"),
        ("gsm8k-chat", "test=test.jsonl,train=mbpp.jsonl",
         "example mbpp.jsonl, line"),
        ("gsm8k-cot", "test=test.jsonl[3]", "expected a part such as rows[:500], got rows[3]"),
        ("gsm8k-cot", "test=test.jsonl[10:]",
         "test of rows[10:] of test.jsonl: expected at least one row"),
        ("gsm8k-cot,story", "test=test.jsonl",
         "story is generated: --data-files is for tasks that read data"),
        ("gsm8k-chat", "test=test.jsonl,train=test.jsonl", "--data-files must be disjoint"),
        ("gsm8k-cot", "test.jsonl", "must be as test=PATH,train=PATH, each split once, got 'test"),
        ("gsm8k-cot", "test=a,test=b", "each split once"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_model_is_looked_at(
    tasks, files, message, capsys, monkeypatch
):
    monkeypatch.delattr(evaluate, "checked_outline")
    assert evaluate.main(["--tasks", tasks, "--data-files", files]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_later_row_is_named_by_its_line_of_the_file():
    Path("rows.csv").write_text("question,answer\n" + "a,#### 1\n" * 4 + "b,none\n")
    task = find_task("wino-gsm8k", data_files={"test": "rows.csv[3:]"})
    with pytest.raises(InputError, match=r"rows\.csv, row 4: expected one number"):
        task.problems("heldout", None)


def test_several_tasks_share_them():
    """One of them may need fewer; --data and prompts of your own need none."""
    files = {"test": "test.jsonl", "train": "train.jsonl"}
    for task in find_tasks(["gsm8k-cot", "gsm8k-chat"], data_files=files):
        assert len(task.problems("heldout", None)) == 10
    more = ["--data-files", "test=test.jsonl"]
    with pytest.raises(InputError, match="leave out --tasks and --data-files"):
        _ = evaluate.parse(["--data", "test.jsonl", "--judge", "numeric", *more]).chosen
    assert pipeline(["--prompt", "?", *more]) == 2


def test_a_comparison_takes_them():
    entry = {"name": "D2F", "kind": "ours", "model": "tiny-d2f"}
    values = {"output": "out", "entries": [entry], "tasks": ["gsm8k-cot"], "problems": 2}
    Path("comparison.yaml").write_text(dump(values | {"data_files": {"test": "test.jsonl"}}))
    (workload,) = make_workloads(read_comparison("comparison.yaml"))
    assert {item.problem.row["question"] for item in workload.items} <= {
        row["question"] for row in ROWS[:10]
    }
    with pytest.raises(InputError, match=r"'tests'; did you mean test\?"):
        read_comparison("comparison.yaml", ["--data_files.tests", "test.jsonl"])
