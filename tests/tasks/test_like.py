"""Task files that build on one another: what is inherited, from where, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from d2f.config import dump
from d2f.errors import InputError
from d2f.tasks import find_task
from d2f.tasks.data_task import read_task_file

BASE = {
    "name": "sums",
    "data": "rows.jsonl",
    "splits": {"tuning": 0.5, "heldout": 0.5},
    "prompt": "{{ question }}",
    "few_shot": {"examples": [{"question": "1+1?", "answer": "2"}]},
    "stop": ["Q:"],
    "judge": "numeric",
}
ROWS = [{"question": f"{i}+1?", "answer": str(i + 1)} for i in range(9)]


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    write(tmp_path / "base.yaml", BASE)
    return tmp_path


def write(path: Path, keys: dict) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(dump(keys))
    return str(path)


def test_keys_go_over_those_of_the_other_file(folder):
    keys = {
        "like": "base.yaml", "stop": None, "few_shot": {"turns": False}, "max_new_tokens": 9,
        "splits": {"heldout": 1.0, "tuning": None}, "judge": {"tolerance": 0.5},
    }  # fmt: skip
    found = read_task_file(Path(write(folder / "mine.yaml", keys)))
    assert found == {
        "data": "rows.jsonl", "splits": {"heldout": 1.0}, "prompt": "{{ question }}",
        "few_shot": BASE["few_shot"] | {"turns": False}, "max_new_tokens": 9,
        "judge": {"name": "numeric", "tolerance": 0.5},
    }  # fmt: skip
    task = find_task(str(folder / "mine.yaml"))
    assert (task.name, task.stop) == ("mine", ())
    assert len(task.problems("heldout", None)) == len(ROWS)


def test_another_judge_has_none_of_the_options(folder):
    write(folder / "near.yaml", {"like": "base.yaml", "judge": {"tolerance": 0.5}})
    for judge in ("exact", {"name": "exact"}):
        path = write(folder / "mine.yaml", {"like": "near.yaml", "judge": judge})
        assert read_task_file(Path(path))["judge"] == {"name": "exact"}


def test_data_stays_beside_the_file_that_names_it(folder, monkeypatch):
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")  # where files are looked for too
    splits = {"heldout": "rows.jsonl", "tuning": "few.jsonl"}
    (folder / "few.jsonl").write_text(json.dumps(ROWS[0]))
    write(folder / "base.yaml", BASE | {"splits": splits})
    write(folder / "b" / "mine.yaml", {"like": "../base.yaml"})
    task = find_task(write(folder / "c" / "more.yaml", {"like": "../b/mine.yaml"}))
    assert [len(task.problems(split, None)) for split in splits] == [len(ROWS), 1]


def test_a_shipped_one_is_found_by_its_name(folder):
    splits = {"heldout": 0.5, "train": 0.5, "tuning": None}
    keys = {"like": "gsm8k", "data": "rows.jsonl", "dataset_config": None, "splits": splits}
    task = find_task(write(folder / "gsm8k.yaml", keys))
    assert task.stop == ("Question:",)
    assert str(task.problems("heldout", 1)[0].prompt).count("Question:") == 4 + 1


def test_the_identity_has_what_is_inherited(folder):
    path = write(folder / "mine.yaml", {"like": "base.yaml"})
    before = find_task(path).identity
    assert before == find_task(path).identity
    write(folder / "base.yaml", BASE | {"prompt": "{{ question }} "})
    assert find_task(path).identity != before


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"mine": {"like": "mine.yaml"}}, r"in a circle: \S*mine.yaml -> \S*mine.yaml$"),
        (
            {"mine": {"like": "a.yaml"}, "a": {"like": "./b.yaml"}, "b": {"like": "a.yaml"}},
            r"b.yaml: like: .* circle: \S*mine.yaml -> \S*a.yaml -> \S*b.yaml -> \S*a.yaml$",
        ),
        ({"mine": {"like": "none.yaml"}}, "mine.yaml: like: expected .* gsm8k, .*'none.yaml'$"),
        ({"mine": {"like": "x" * 300}}, "mine.yaml: like: expected another task file"),
        ({"mine": {"like": 3}}, "mine.yaml: like: expected another task file, .*got 3$"),
        ({"mine": {"like": "base.yaml", "colums": 1}}, "mine.yaml: colums: there is no such key"),
        ({"mine": {"like": "a.yaml"}, "a": {"colums": 1}}, "a.yaml: colums: there is no such key"),
        ({"mine": {"like": "base.yaml", "data": None}}, "mine.yaml: data: "),
        ({"mine": {"like": "base.yaml", "judge": {"most": 1}}}, "most: there is no such key"),
    ],
)
def test_what_is_wrong_is_said(folder, files, message):
    for name, keys in files.items():
        write(folder / f"{name}.yaml", keys)
    with pytest.raises(InputError, match=message) as error:
        find_task(str(folder / "mine.yaml"))
    assert "\n" not in str(error.value)
