"""Training data by its form: where rows come from, how columns are named, what a bad one says."""

from __future__ import annotations

import json

import datasets
import pyarrow
import pytest
from data_rows import pairs, settings, stream, texts, write
from pyarrow import parquet

from d2f.errors import InputError
from distill.config import COLUMNS
from distill.data.samples import read_pair

PAIRS = [{"prompt": "2+3?", "response": "5"}, {"prompt": "1+1?", "response": "2"}]
AS_TEXT = {
    ("<|user|>2+3?<|assistant|>", "5<|endoftext|>"),
    ("<|user|>1+1?<|assistant|>", "2<|endoftext|>"),
}
CHAT = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "5"},
]


def test_jsonl_of_pairs(tmp_path):
    """Blank lines are no rows, and a line ends at a line feed only."""
    path = write(tmp_path / "d.jsonl", [PAIRS[0], "", PAIRS[1], "  "])
    assert texts(stream(file=str(path))) == AS_TEXT
    path.write_text('{"prompt": "2+3?", "response": "5\u2028\u2028"}\n', encoding="utf-8")
    expected = {("<|user|>2+3?<|assistant|>", "5\u2028\u2028<|endoftext|>")}
    assert texts(stream(file=str(path))) == expected


def test_messages_take_the_last_assistant_turn(tmp_path):
    """All before it is the prompt through the chat template; what follows it is not read."""
    path = write(tmp_path / "d.jsonl", [{"messages": [*CHAT, {"role": "user", "content": "ok"}]}])
    prompt = "<|user|>2+3?<|assistant|>4<|endoftext|><|user|>sure?<|assistant|>"
    assert texts(stream(file=str(path))) == {(prompt, "5<|endoftext|>")}
    datasets.Dataset.from_list([{"messages": CHAT, "id": 1}]).to_parquet(tmp_path / "d.parquet")
    assert texts(stream(file=str(tmp_path / "d.parquet"))) == {(prompt, "5<|endoftext|>")}


def test_column_presets_and_own_columns(tmp_path):
    """A system column becomes the first message where it is not empty."""
    published = write(tmp_path / "p.jsonl", [{"question": "2+3?", "qwen7b_answer": "5", "id": 1}])
    expected = {("<|user|>2+3?<|assistant|>", "5<|endoftext|>")}
    assert texts(stream(file=str(published), columns="d2f-reference")) == expected
    own = {"prompt": "question", "response": "qwen7b_answer"}
    assert texts(stream(file=str(published), columns=own)) == expected
    turns = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
    for system in (None, ""):
        row = {"system": system, "conversations": turns}
        path = write(tmp_path / "s.jsonl", [row])
        assert texts(stream(file=str(path), columns="bespoke-stratos")) == expected
    row = {"system": "Think.", "conversations": turns}
    messages, response = read_pair(row, COLUMNS["bespoke-stratos"])
    assert [(m["role"], m["content"]) for m in messages] == [("system", "Think."), ("user", "2+3?")]
    assert response == "5"


def test_all_kinds_of_files_and_data_sets_give_the_same_samples(tmp_path):
    """A file that is called .json may be JSONL all the same."""
    made = datasets.Dataset.from_list(PAIRS)
    made.to_parquet(str(tmp_path / "d.parquet"))
    (tmp_path / "d.json").write_text(json.dumps(PAIRS, indent=1))
    write(tmp_path / "lines.json", PAIRS)
    for name in ("d.parquet", "d.json", "lines.json"):
        assert texts(stream(file=str(tmp_path / name))) == AS_TEXT
    (tmp_path / "d.csv").write_text("prompt,response,more\n2+3?,five,1\n1+1?,two,2\n")
    assert {answer for _, answer in texts(stream(file=str(tmp_path / "d.csv")))} == {
        "five<|endoftext|>", "two<|endoftext|>"
    }  # fmt: skip
    made.save_to_disk(str(tmp_path / "one"))
    splits = datasets.DatasetDict({"train": made, "test": made.select([0])})
    splits.save_to_disk(str(tmp_path / "two"))
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", PAIRS)
    for name in ("one", "two", "files"):
        assert texts(stream(dataset=str(tmp_path / name))) == AS_TEXT
    for name, split in (("two", "test"), ("files", "train[:1]")):
        assert len(texts(stream(dataset=str(tmp_path / name), split=split))) == 1


BAD_LINES = {
    '{"prompt": "1?", "respo': "not JSON",
    "[1, 2]": "expected an object",
    "null": "expected an object",
    '{"prompt": "1?"}': "expected the key response, got prompt",
    '{"prompt": "1?", "response": " \\n"}': "response must be non-empty text",
    '{"prompt": 3, "response": "4"}': "prompt must be non-empty text, got 3",
    '{"messages": {}}': "must be a list of messages",
    '{"messages": [{"role": "user", "content": "1?"}]}': "needs an assistant turn",
    '{"messages": [{"role": "assistant", "content": "1"}]}': "needs an assistant turn",
    '{"messages": [{"content": "1?"}]}': "expected the key role, got content",
    '{"messages": [{"role": "tool", "content": "1"}, {"role": "assistant", "content": "1"}]}':
        "refused the messages",
    '{"prompt": "<|mask|>", "response": "4"}': "the prompt contains the mask token",
    '{"prompt": "1?", "response": "<|mask|>4"}': "the response contains the mask token",
    '{"prompt": "1?", "response": "4<|endoftext|>"}': "contains its end token .* at token 1",
    '{"prompt": [1, 2, 3, 4], "response": "4"}': r"got \[1, 2, 3, 4\];",
}  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_broken_line_is_named_or_skipped_and_counted(tmp_path, line, message):
    path = write(tmp_path / "d.jsonl", [PAIRS[0], "", line, PAIRS[1]])
    with pytest.raises(InputError, match=rf"d\.jsonl, line 3: .*{message}.*on_bad_row") as caught:
        stream(file=str(path))
    said = str(caught.value)
    assert said.encode() and "\n" not in said and len(said) < len(str(path)) + 600  # printable
    left = stream(file=str(path), on_bad_row="skip")
    assert texts(left) == AS_TEXT
    assert f"1 broken (first: {path}, line 3: " in left.report()


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff", "response": "b"}\n')
    with pytest.raises(InputError, match=r"line 2: not JSON"):
        stream(file=str(path))
    (tmp_path / "bom.jsonl").write_text("\ufeff" + json.dumps(PAIRS[0]), encoding="utf-8")
    assert len(texts(stream(file=str(tmp_path / "bom.jsonl")))) == 1


@pytest.mark.parametrize("value", [5, None, b"5", {"a": 1}])
def test_a_parquet_column_of_another_kind_is_named(tmp_path, value):
    rows = {"prompt": ["a", "b"], "response": [value] * 2}
    datasets.Dataset.from_dict(rows).to_parquet(str(tmp_path / "d.parquet"))
    message = f"row 0: response must be non-empty text, got {value!r}"
    with pytest.raises(InputError, match=message):
        stream(file=str(tmp_path / "d.parquet"))


@pytest.mark.parametrize("values", [["x" * 1000], ["x" * 10**5], [{"content": "x" * 1000}]])
def test_a_parquet_file_that_unpacks_to_very_much_is_refused(tmp_path, monkeypatch, values):
    """Before anything of it is in the cache on the disk: what repeats takes no place in a file."""
    monkeypatch.setattr("d2f.data._UNPACKED", 2**20)
    monkeypatch.setattr("d2f.data._read", None)
    path = tmp_path / "d.parquet"
    parquet.write_table(pyarrow.table({"prompt": 2000 * values}), path, compression="zstd")
    assert path.stat().st_size < 10_000
    for where in ({"file": str(path)}, {"dataset": str(tmp_path)}):
        with pytest.raises(InputError, match=r"d\.parquet: expected at most 1,048,576 bytes of r"):
            stream(**where)


def test_files_that_cannot_be_data(tmp_path):
    for place in (tmp_path, "/dev/zero"):  # a device has no end
        with pytest.raises(
            InputError, match="expected a file of rows, got a folder, a pipe or a device"
        ):
            stream(file=str(place))
    (tmp_path / "empty.jsonl").touch()
    blank = write(tmp_path / "blank.jsonl", ["", " "])
    for path in (tmp_path / "empty.jsonl", blank):
        with pytest.raises(InputError, match=rf"{path.name}: expected at least one row, got none"):
            stream(file=str(path))
    with pytest.raises(InputError, match=r"none\.jsonl: cannot be read: No such file"):
        stream(file=str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match=r"none\.parquet: cannot be read: No such file"):
        stream(file=str(tmp_path / "none.parquet"))
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match=r"cut\.parquet: cannot be loaded as a data set"):
        stream(file=str(tmp_path / "cut.parquet"))
    broken = write(tmp_path / "broken.jsonl", ["{", "{"])
    with pytest.raises(InputError, match=r"no row is left to train on; .* 2 broken"):
        stream(file=str(broken), on_bad_row="skip")


def test_data_sets_that_cannot_be_data(tmp_path):
    made = datasets.Dataset.from_list([{"question": "1?", "answer": "2"}])
    made.save_to_disk(str(tmp_path / "one"))
    with pytest.raises(InputError, match="columns prompt and response, or messages, got question"):
        stream(dataset=str(tmp_path / "one"))
    with pytest.raises(InputError, match="columns question and qwen7b_answer, got question, answ"):
        stream(dataset=str(tmp_path / "one"), columns="d2f-reference")
    with pytest.raises(InputError, match=r"dataset_config: .* saved data set"):
        stream(dataset=str(tmp_path / "one"), dataset_config="main")
    datasets.DatasetDict({"a": made, "b": made}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(InputError, match=r"two: expected split among a, b, got test"):
        stream(dataset=str(tmp_path / "two"), split="test")
    with pytest.raises(InputError, match="nobody/nothing: cannot be loaded as a data set"):
        stream(dataset="nobody/nothing")
    (tmp_path / "files").mkdir()
    write(tmp_path / "files" / "train.jsonl", PAIRS)
    with pytest.raises(InputError, match=r"files: cannot be loaded .*held"):
        stream(dataset=str(tmp_path / "files"), split="held")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "one of data.dataset, data.tasks and data.file"),
        ({"file": "a", "dataset": "b"}, "and only one"),
        ({"file": "a", "columns": "bespoke"}, "one of bespoke-stratos, d2f-reference"),
        ({"file": "a", "columns": {"prompt": "q"}}, "columns need prompt and response, messages"),
        (
            {"file": "a", "columns": {"prompt": "q", "response": "a", "messages": "m"}},
            "columns need prompt and response, messages",
        ),
        ({"file": "a", "on_long": "cut"}, "on_long"),
        ({"file": "a", "max_prompt": 0}, "max_prompt"),
    ],
)
def test_a_bad_section_is_an_error(values, message):
    with pytest.raises(ValueError, match=message):
        settings(**values)


def test_a_file_has_no_tail_unless_asked_and_tasks_have_one():
    def tail(**source):
        made = settings(**source)
        return made.padded_share, made.short_tail, made.tail_weight

    assert tail(tasks={"story": 1.0}) == (0.5, 7, 0.1)
    assert tail(file="a") == tail(dataset="a") == (0.0, 0, 0.1)
    assert tail(file="a", train_on_padding=True) == (1.0, 0, 1.0)
    assert tail(file="a", train_on_padding=True, tail_weight=0.5, short_tail=2) == (1.0, 2, 0.5)


def test_rows_keep_their_numbers_over_batches(tmp_path):
    """More rows than a batch of the encoding: the broken one far down is named by its line."""
    path = write(tmp_path / "d.jsonl", [*pairs(1500), "", "{", *pairs(10)])
    with pytest.raises(InputError, match="line 1502: not JSON"):
        stream(file=str(path))
