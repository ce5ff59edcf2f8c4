"""Tasks of data: splits that never meet, prompts to the letter, and errors that say which row."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from d2f.config import dump
from d2f.errors import InputError
from d2f.models import resolve
from d2f.tasks import find_task, find_tasks, task_of_data
from d2f.tokenizer import load_tokenizer, render
from decode.cli import outline
from decode.compare.config import Item, Workload
from decode.compare.local import encode_all
from decode.decoders import find_decoder
from decode.jobs import encode_problems

ROWS = [
    {"question": f"What is {i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"} for i in range(60)
]
TASK = {"data": "rows.jsonl", "judge": "numeric"}


def write(folder: Path, rows: list, **keys: object) -> str:
    """A task file beside its data; its path."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    path = folder / "mine.yaml"
    path.write_text(dump({key: v for key, v in (TASK | keys).items() if v is not None}))
    return str(path)


def test_a_file_and_a_judge_are_a_task(tmp_path):
    write(tmp_path, ROWS)
    task = task_of_data(str(tmp_path / "rows.jsonl"), "numeric")
    assert (task.name, task.response_length, task.default_count) == ("rows", 256, None)
    problem = task.problems("heldout", 1)[0]
    assert problem.prompt == [{"role": "user", "content": problem.question}]
    assert task.right(problem, f"I say {problem.row['answer'].split()[-1]}")
    assert not task.right(problem, "I say 1000")
    assert task.answer("$7.00") == task.answer("#### 7")


def test_splits_are_disjoint_and_together_all(tmp_path):
    shares = {"train": 0.3, "tuning": 0.3, "heldout": 0.4}
    task = find_task(write(tmp_path, ROWS, splits=shares))
    parts = {split: {p.key for p in task.problems(split, None)} for split in shares}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values())) == len(ROWS)
    assert all(len(part) > 5 for part in parts.values())
    assert {p.key for p in task.problems("all", None)} == set.union(*parts.values())
    # By content: other rows beside it, or another order, move no row to another split.
    again = find_task(
        write(tmp_path, [*ROWS[::-1], {"question": "?", "answer": "1"}], splits=shares)
    )
    for split, part in parts.items():
        assert part <= {p.key for p in again.problems(split, None)}


def test_fewer_problems_are_the_beginning_of_more(tmp_path):
    task = find_task(write(tmp_path, ROWS))
    some, more = task.problems("heldout", 5), task.problems("heldout", 9)
    assert some == more[:5] != ROWS[:5]
    assert some != task.problems("heldout", 5, seed=1)
    with pytest.raises(ValueError, match=r"count must be at most \d+, the problems of the heldout"):
        task.problems("heldout", 1000)


def test_a_data_sets_own_splits_are_taken_by_name(tmp_path):
    made = datasets.Dataset.from_list(ROWS)
    both = datasets.DatasetDict({"test": made.select(range(7)), "train": made.select(range(7, 60))})
    both.save_to_disk(str(tmp_path / "saved"))
    splits = {"heldout": "test", "tuning": "train"}
    task = find_task(write(tmp_path, [], data="saved", splits=splits))
    assert len(task.problems("heldout", None)) == 7
    assert len(task.problems("tuning", None)) == 53
    with pytest.raises(InputError, match="mine has no split train, it has heldout, tuning"):
        task.problems("train", 1)
    with pytest.raises(InputError, match="mine has no split all"):
        task.problems("all", 1)


def test_parquet_and_other_files_too(tmp_path):
    datasets.Dataset.from_list(ROWS[:4]).to_parquet(str(tmp_path / "a.parquet"))
    datasets.Dataset.from_list(ROWS[4:9]).to_parquet(str(tmp_path / "b.parquet"))
    splits = {"heldout": "a.parquet", "tuning": "b.parquet"}
    task = find_task(write(tmp_path, [], data="a.parquet", splits=splits))
    assert [len(task.problems(s, None)) for s in splits] == [4, 5]


SHOTS = {"examples": [{"question": "1+1?", "answer": "2"}]}
TEXT = {"prompt": "Q: {{ question }}\nA:", "example": " {{ answer }}", "system": "Add."}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [{"role": "user", "content": "5?"}]),
        ({"chat": False}, "5?"),
        ({"chat": False, "prompt": "{{ question }}\n"}, "5?\n"),
        (TEXT | {"chat": False}, "Add.\n\nQ: 5?\nA:"),
        (
            TEXT | {"chat": False, "few_shot": SHOTS, "separator": "\n"},
            "Add.\nQ: 1+1?\nA: 2\nQ: 5?\nA:",
        ),
        (
            {"few_shot": SHOTS, "system": "Add."},
            [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "5?"},
            ],
        ),
        (
            TEXT | {"few_shot": SHOTS | {"turns": False}},
            [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "Q: 1+1?\nA: 2\n\nQ: 5?\nA:"},
            ],
        ),
    ],
)
def test_prompts_are_made_to_the_letter(tmp_path, keys, expected):
    row = {"question": "5?", "answer": "5"}
    task = find_task(write(tmp_path, [row], splits={"heldout": 1.0}, **keys))
    assert task.problems("heldout", 1)[0].prompt == expected


def test_messages_are_taken_as_they_are(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    asked = [*turns, {"role": "user", "content": "c?"}]
    path = write(tmp_path, [{"messages": asked, "reference": 3}], splits={"heldout": 1})
    problem = find_task(path).problems("heldout", 1)[0]
    assert (problem.prompt, problem.question, problem.answer) == (asked, "c?", "3")
    with pytest.raises(InputError, match="line 1: messages must be a list of role and content"):
        bad = write(tmp_path, [{"messages": turns, "answer": 3}], splits={"heldout": 1})
        find_task(bad).problems("heldout", 1)


def test_examples_come_from_a_split_and_are_never_the_problem_itself(tmp_path):
    splits = {"train": 0.5, "heldout": 0.5}
    path = write(tmp_path, ROWS, splits=splits, few_shot={"count": 3})
    task = find_task(path)
    train = {p.question for p in task.problems("train", None)}
    shown = [
        tuple(m["content"] for m in p.prompt[:-1] if m["role"] == "user")
        for p in task.problems("heldout", None)
    ]
    assert len(set(shown)) == 1 and set(shown[0]) <= train
    for problem in task.problems("train", None):
        assert problem.question not in [m["content"] for m in problem.prompt[:-1]]
    drawn = find_task(write(tmp_path, ROWS, splits=splits, few_shot={"count": 3, "seed": 0}))
    different = [str(p.prompt[:-1]) for p in drawn.problems("heldout", None)]
    assert len(set(different)) > len(different) // 2
    assert different == [str(p.prompt[:-1]) for p in drawn.problems("heldout", None)]


def test_the_identity_changes_with_what_decides_a_verdict(tmp_path):
    paths = [
        (ROWS, {}),
        (ROWS[1:], {}),
        (ROWS, {"judge": "exact"}),
        (ROWS, {"prompt": "{{ answer }}"}),
    ]
    found = [find_task(write(tmp_path, rows, **keys)).identity for rows, keys in paths]
    assert len(set(found)) == len(found)
    assert found[0] == find_task(write(tmp_path, ROWS)).identity


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (ROWS, {"judge": None}, "judge: expected a value, got nothing"),
        (ROWS, {"columns": {}}, "columns: there is no such key"),
        (ROWS, {"judge": "no"}, "mine.yaml: no such judge: got 'no'; expected one of exact"),
        (ROWS, {"judge": {"name": "python", "tests": "1"}}, "--allow-code-execution"),
        (ROWS, {"prompt": "{{ question"}, "cannot be read"),
        (ROWS, {"splits": {"heldout": 0.8, "tuning": 0.3}}, "must add up to at most 1, got 1.1"),
        (ROWS, {"splits": {"test": 1.0}}, "splits.test"),
        (ROWS, {"splits": {"heldout": "a", "tuning": "a"}}, "disjoint, got a, a"),
        (ROWS, {"few_shot": {"count": 2}}, "few_shot.split must be one of splits, tuning, heldout"),
        (ROWS, {"few_shot": {}}, "exactly one of count and examples"),
        (ROWS, {"name": "story"}, "story is the name of a generated task"),
        (ROWS, {"max_new_tokens": 0}, "max_new_tokens: expected at least 1, got 0"),
        (ROWS, {"data": "none.jsonl"}, "mine: none.jsonl: cannot be read: No such file"),
        (ROWS, {"split": "test"}, "dataset_config and split are for data sets"),
        (ROWS, {"splits": {"heldout": "test"}}, "mine: test: cannot be read: No such file"),
        (ROWS, {"prompt": "{{ problem }}"}, "rows.jsonl, line .*'problem' is undefined"),
        (ROWS, {"reference": "{{ 1 // 0 }}"}, "line .*: the template"),
        (ROWS, {"judge_gen_prefix": True}, "judge_gen_prefix needs a gen_prefix"),
        (ROWS, {"gen_prefix": "{{ absent }}"}, "line .*: the template .*'absent' is undefined"),
        ([{"text": "?", "answer": "1"}], {}, "expected one of messages, prompt, question, got the"),
        ([{"question": "?", "text": "1"}], {}, "expected one of reference, answer, response"),
        ([{"question": "?", "answer": "one"}], {}, "expected one number as the reference"),
        (["{"], {}, "line 1: not JSON"),
        (["[1]"], {}, "expected an object of columns"),
        ([], {}, "expected at least one row, got none"),
        (ROWS[:1], {"splits": {"heldout": 1e-9}}, "none of the 1 rows"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path, rows, keys, message):
    keys = {"splits": {"heldout": 1.0}} | keys if len(rows) < 2 else keys
    with pytest.raises(InputError, match=message) as error:
        find_task(write(tmp_path, rows, **keys)).problems("heldout", 1)
    assert "\n" not in str(error.value)


def test_columns_that_a_data_set_lacks_are_named(tmp_path):
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    path = write(tmp_path, [], data="a.parquet", prompt="{{ problem }}")
    with pytest.raises(
        InputError, match=r"a\.parquet, row .*'problem' is undefined, there are answer, question"
    ):
        find_task(path).problems("heldout", 1)


def test_tasks_come_each_once_and_an_unknown_one_lists_what_there_is():
    for given in (["story", "story"], []):
        with pytest.raises(InputError, match="each once"):
            find_tasks(given)
    with pytest.raises(InputError, match=r"'stroy'; did you mean story\?; expected one of .*gsm8k"):
        find_task("stroy")


# The beginning of the response that the prompt holds already.

BEGUN = {"question": "1+1?", "answer": "2", "letter": "x"}
PREFIX = "<b> {{ letter }}\n"


def begun_task(folder, **keys):
    return find_task(write(folder, [BEGUN], splits={"heldout": 1.0}, judge="exact", **keys))


def prompt_of(folder, **keys):
    return begun_task(folder, **keys).problems("heldout", 1)[0].prompt


@pytest.mark.parametrize("keys", [{}, {"few_shot": {"examples": [BEGUN]}}, {"system": None}])
def test_it_follows_what_opens_the_answer(tmp_path, keys):
    tokenizer = load_tokenizer(resolve("tiny-d2f"))
    without = render(tokenizer, prompt_of(tmp_path, **keys))
    assert without.endswith("<|assistant|>")
    assert render(tokenizer, prompt_of(tmp_path, gen_prefix=PREFIX, **keys)) == (
        without + "<b> x\n"
    )


def test_every_way_to_the_ids_has_it(tmp_path):
    """Without a chat it follows the text."""
    text = prompt_of(tmp_path, gen_prefix=PREFIX, chat=False, prompt="Q: {{ question }}")
    assert text == "Q: 1+1?<b> x\n"
    model = outline("tiny-d2f")
    (problem,) = begun_task(tmp_path, gen_prefix=PREFIX).problems("heldout", 1)
    (ids,) = encode_problems(model, [problem], find_decoder("d2f")(max_new_tokens=16))
    assert model.tokenizer.decode(ids) == "<|user|>1+1?<|assistant|><b> x\n"
    item = Item("1", problem.prompt)
    assert encode_all(model.tokenizer, Workload("w", [item], 1, 1, 16, ()), "here") == [ids]


def test_the_judge_reads_it_only_if_asked_to(tmp_path):
    for read, right in ((False, "2"), (True, "")):
        task = begun_task(tmp_path, gen_prefix="2", judge_gen_prefix=read)
        (problem,) = task.problems("heldout", 1)
        assert [text for text in ("2", "") if task.right(problem, text)] == [right]
        assert task.answer(right) == "2"
    # Of a prefix that differs from row to row no answers of several responses can be counted.
    assert begun_task(tmp_path, gen_prefix=PREFIX, judge_gen_prefix=True).answer("2") is None
