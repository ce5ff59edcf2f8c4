"""decode.batch: every row answered once, bad ones apart, whatever the kind of the input and
wherever a run was killed."""

from __future__ import annotations

import json
import shutil

import pytest
from batch_runs import BAD, ROWS, answered, command, files, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import POISON, poisoned_model

from decode import batch
from decode.batch import FIELDS, renamed
from decode.engine import prompts


def lines_of(data: bytes) -> list:
    return [json.loads(line) for line in data.splitlines()]


def test_each_row_is_answered_beside_its_own_fields_and_bad_ones_apart(saved, tmp_path, capsys):
    found = answered(saved, write_rows(tmp_path / "rows.jsonl"), tmp_path / "out")
    answers, bad = lines_of(found["answers.jsonl"]), lines_of(found["bad.jsonl"])
    assert [answer["row"] for answer in answers] == [n for n in range(len(ROWS)) if n not in BAD]
    assert answers[0]["id"] == "a" and answers[0]["input_text"] == "the input's own"
    assert answers[1]["messages"] == ROWS[2]["messages"] and answers[2]["n"] == 0
    for answer in answers:
        assert answer["forwards"] > 0 and len(answer["tokens"]) <= 16 and answer["text"] is not None
    assert [line["row"] for line in bad] == list(BAD)
    assert "rows.jsonl, line 2" in bad[0]["where"] and "got the keys id, promt" in bad[0]["error"]
    assert bad[0]["input"] == ROWS[1] and "got 9999" in bad[1]["error"]
    said = capsys.readouterr()
    assert f"{len(answers)} rows answered in " in said.out and "2 rows could not be" in said.err


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_answers_do_not_depend_on_the_batch(saved, tmp_path, temperature):
    rows, sampling = write_rows(tmp_path / "rows.jsonl"), ("--temperature", temperature)
    found = answered(saved, rows, tmp_path / "three", *sampling)
    alone = command(saved, rows, tmp_path / "alone", *sampling)
    assert batch.main([*alone, "--batch-size", "1"]) == 0
    assert files(tmp_path / "alone") == found
    seeds = {answer["seed"] for answer in lines_of(found["answers.jsonl"])}
    assert len(seeds) == (1 if temperature == "0" else len(ROWS) - len(BAD))


@pytest.fixture(scope="module")
def whole(saved, tmp_path_factory):
    """A run that nothing disturbed: its rows, its folder and what is in it."""
    folder = tmp_path_factory.mktemp("whole")
    rows = write_rows(folder / "rows.jsonl")
    return rows, folder / "out", answered(saved, rows, folder / "out", "--temperature", "0.9")


@settings(max_examples=8)
@given(data=st.data())
def test_a_run_killed_anywhere_goes_on_without_doing_or_losing_a_row_twice(
    data, saved, whole, tmp_path_factory
):
    rows, done, expected = whole
    ledger = (done / "ledger.jsonl").read_bytes()
    # The first line is there as a whole or not at all.
    first = ledger.index(b"\n") + 1
    cut = data.draw(st.just(0) | st.integers(first, len(ledger)), label="bytes written")
    folder = tmp_path_factory.mktemp("killed")
    (folder / "ledger.jsonl").write_bytes(ledger[:cut])
    kept = max(0, ledger[:cut].count(b"\n") - 1)
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("decode.engine.prompts.checked", counting(asked))
        assert answered(saved, rows, folder, "--temperature", "0.9") == expected
    good = sum(line["error"] is None for line in lines_of(ledger)[1 : kept + 1])
    assert len(asked) == len(set(asked)) == len(ROWS) - len(BAD) - good
    shutil.rmtree(folder)


def counting(asked: list):
    def checked(model, prompt, decoder, where, *, raw, real=prompts.checked):
        found = real(model, prompt, decoder, where, raw=raw)
        asked.append(where)
        return found

    return checked


@pytest.mark.parametrize("kind", ["parquet", "saved data set"])
def test_a_table_comes_back_as_parquet_with_all_its_columns(saved, tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    rows = [
        {"prompt": "2 + 3", "text": "own", "numbers": [1, 2]},
        {"prompt": None, "text": "nothing is asked", "numbers": []},
        {"prompt": "4 + 3", "text": "other", "numbers": None},
    ]
    table = datasets.Dataset.from_list(rows)
    place = tmp_path / ("rows.parquet" if kind == "parquet" else "rows")
    table.to_parquet(str(place)) if kind == "parquet" else table.save_to_disk(str(place))
    assert batch.main(command(saved, place, tmp_path / "out")) == 0
    made = datasets.Dataset.from_parquet(str(tmp_path / "out" / "answers.parquet"))
    assert made.column_names == ["prompt", "input_text", "numbers", *FIELDS]
    assert made["row"][:] == [0, 2] and made["numbers"][:] == [[1, 2], None]
    assert made["input_text"][:] == ["own", "other"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert batch.main(command(saved, tmp_path / "rows.jsonl", tmp_path / "lines")) == 0
    lines = lines_of((tmp_path / "lines" / "answers.jsonl").read_bytes())
    assert [made[i]["tokens"] for i in range(2)] == [line["tokens"] for line in lines]


def test_fields_of_ones_own_keep_a_name_each():
    assert renamed(["text", "row", "x"]) == ["input_text", "input_row", "x"]
    assert renamed(["text", "input_text"]) == ["input_input_text", "input_text"]


def test_what_is_written_is_json_where_a_row_is_not_quite(saved, tmp_path):
    """Python reads NaN, and would write it."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 3", "x": NaN}\n{"n": {"z": -Infinity}, "prompt": null}\n')
    found = answered(saved, rows, tmp_path / "out")
    (answer,), (bad,) = lines_of(found["answers.jsonl"]), lines_of(found["bad.jsonl"])
    assert answer["x"] is None and bad["input"] == {"n": {"z": None}, "prompt": None}
    assert bad["error"].endswith("got the keys n, prompt (null)")


@pytest.mark.parametrize("name", ["answers.jsonl", "bad.jsonl"])
def test_files_of_others_are_not_written_over(saved, unloadable, tmp_path, capsys, name):
    rows = write_rows(tmp_path / name)  # the input itself
    before = rows.read_bytes()
    assert batch.main(command(saved, rows, tmp_path)) == 2
    assert f"{name} exists and is not of this command" in capsys.readouterr().err
    assert rows.read_bytes() == before and list(tmp_path.iterdir()) == [rows]


def test_a_row_that_fails_in_decoding_is_a_bad_row_and_the_others_are_answered(
    saved, tmp_path, monkeypatch
):
    model = poisoned_model()
    monkeypatch.setattr("decode.workers.load", lambda options: (model, "poisoned"))
    (tmp_path / "rows.jsonl").write_text(f'{{"ids": [3, 4]}}\n{{"ids": [3, {POISON}]}}\n')
    found = answered(saved, tmp_path / "rows.jsonl", tmp_path / "out")
    (bad,) = lines_of(found["bad.jsonl"])
    assert bad["row"] == 1 and "NonFiniteLogitsError" in bad["error"]
    assert [answer["row"] for answer in lines_of(found["answers.jsonl"])] == [0]


@pytest.fixture
def unloadable(monkeypatch):
    """Weights that nobody may read."""
    monkeypatch.setattr("decode.workers.load", lambda *_: pytest.fail("weights were read"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--input", "other.jsonl"], "input was"),
        (["--seed", "3"], "ledger.jsonl is the output of another run: options was"),
        (["--column", "question"], "column was None, now 'question'"),
        (["--split", "test"], "--split and --dataset-config are for data sets"),
        (["--workers", "9999"], "--workers 9999: there are cores for "),
        (["--workers", "2", "--device", "cuda:1"], "expected cuda, which CUDA_VISIBLE_DEVICES"),
        (["--decoder", "autoregressive"], "no option"),
    ],
)
def test_bad_input_is_found_before_weights_are_read(
    saved, whole, unloadable, tmp_path, monkeypatch, capsys, more, message
):
    rows, folder, expected = whole
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"prompt": "2 + 3"}\n')
    before = files(folder)
    assert batch.main(command(saved, rows, folder, "--temperature", "0.9", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert files(folder) == before == expected


def test_rows_none_of_which_fits_the_model_are_an_error(saved, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text('\n{"ids": [9999]}\n')
    assert batch.main(command(saved, tmp_path / "rows.jsonl", tmp_path / "out")) == 2
    assert "none of the 1 rows could be answered" in capsys.readouterr().err
    (bad,) = lines_of((tmp_path / "out" / "bad.jsonl").read_bytes())
    assert bad["where"].endswith("rows.jsonl, line 2")
