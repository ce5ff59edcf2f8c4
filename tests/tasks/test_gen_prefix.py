"""The beginning of a response that the prompt holds already: where it stands, and who reads it."""

from __future__ import annotations

import json

import pytest

from d2f import chat
from d2f.config import dump
from d2f.errors import InputError
from d2f.loading import load_tokenizer
from d2f.models import resolve
from d2f.tasks import find_task
from decode.cli import outline
from decode.compare.config import Item, Workload
from decode.compare.local import encode_all
from decode.decoders import find_decoder
from decode.jobs import encode_problems

ROW = {"question": "1+1?", "answer": "2", "letter": "x"}
PREFIX = "<b> {{ letter }}\n"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve("tiny-d2f"))


def task_of(folder, **keys):
    (folder / "rows.jsonl").write_text(json.dumps(ROW))
    values = {"data": "rows.jsonl", "splits": {"heldout": 1.0}, "judge": "exact"} | keys
    (folder / "mine.yaml").write_text(dump(values))
    return find_task(str(folder / "mine.yaml"))


def problem_of(folder, **keys):
    return task_of(folder, **keys).problems("heldout", 1)[0]


@pytest.mark.parametrize("keys", [{}, {"few_shot": {"examples": [ROW]}}, {"system": None}], ids=str)
def test_it_follows_what_opens_the_answer(tmp_path, tokenizer, keys):
    with_it = problem_of(tmp_path, gen_prefix=PREFIX, **keys).prompt
    without = problem_of(tmp_path, **keys).prompt
    assert chat.render(tokenizer, with_it) == chat.render(tokenizer, without) + "<b> x\n"
    assert chat.render(tokenizer, without).endswith("<|assistant|>")


def test_without_a_chat_it_follows_the_text(tmp_path):
    prompt = problem_of(tmp_path, gen_prefix=PREFIX, chat=False, prompt="Q: {{ question }}").prompt
    assert prompt == "Q: 1+1?<b> x\n"


def test_every_way_to_the_ids_has_it(tmp_path, tokenizer):
    model = outline("tiny-d2f")
    problem = problem_of(tmp_path, gen_prefix=PREFIX)
    (ids,) = encode_problems(model, [problem], find_decoder("d2f")(max_new_tokens=16))
    assert tokenizer.decode(ids) == "<|user|>1+1?<|assistant|><b> x\n"
    item = Item("1", problem.prompt)
    assert encode_all(tokenizer, Workload("w", [item], 1, 1, 16, ()), "here") == [ids]


def test_an_assistants_last_message_is_no_prefix_unless_it_says_so(tokenizer):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert chat.render(tokenizer, turns) == "<|user|>a<|assistant|>b<|endoftext|><|assistant|>"
    begun = [turns[0], turns[1] | {"prefix": True}]
    assert chat.render(tokenizer, begun) == "<|user|>a<|assistant|>b"
    with pytest.raises(InputError, match="expected at least one message"):
        chat.render(tokenizer, [turns[1] | {"prefix": True}])
    with pytest.raises(InputError, match="expected text as the beginning of the answer, got 3"):
        chat.render(tokenizer, [turns[0], turns[1] | {"prefix": True, "content": 3}])


def test_the_judge_reads_it_only_if_asked_to(tmp_path):
    for read, right in ((False, "2"), (True, "")):
        task = task_of(tmp_path, gen_prefix="2", judge_gen_prefix=read)
        problem = task.problems("heldout", 1)[0]
        assert [text for text in ("2", "") if task.right(problem, text)] == [right]
        assert task.answer(right) == "2"
    # Of a prefix that differs from row to row no answers of several responses can be counted.
    assert task_of(tmp_path, gen_prefix=PREFIX, judge_gen_prefix=True).answer("2") is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"judge_gen_prefix": True}, "judge_gen_prefix needs a gen_prefix"),
        ({"gen_prefix": "{{"}, "cannot be read"),
        ({"gen_prefix": ""}, "gen_prefix: "),
        ({"gen_prefix": "{{ absent }}"}, "line 1: the template .*'absent' is undefined"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, keys, message):
    with pytest.raises(InputError, match=message):
        problem_of(tmp_path, **keys)
