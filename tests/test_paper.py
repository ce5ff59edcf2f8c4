"""benchmarks.paper: a published table measured on a tiny model with stand-in rows, both ways to
count, and what is refused before any work."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from tiny import tokenizer

import benchmarks.paper.run_table
from benchmarks.paper.__main__ import main
from benchmarks.paper.paper_figures import compared, figures
from benchmarks.paper.paper_table import read_table, tables
from benchmarks.paper.paper_tasks import WholeResponse, make_task, runs_code
from decode.jobs import Record

ROOT = Path(__file__).parent.parent
ADAPTER = ROOT / "d2f" / "models" / "tiny-d2f" / "adapter"
TINY = ["--model", "tiny-teacher", "--adapter", str(ADAPTER), "--device", "cpu"]
GSM8K = [
    {"question": f"Ann has {i} pens. She buys 1 more.", "answer": f"#### {i + 1}"} for i in range(9)
]
HUMANEVAL = {
    "task_id": "HumanEval/0", "prompt": "def two():\n", "entry_point": "two",
    "canonical_solution": "    return 2\n", "test": "def check(f):\n    assert f() == 2\n",
}  # fmt: skip


def rows(folder: Path) -> list[str]:
    """Stand-in data: a file for one task, a saved data set for the other."""
    (folder / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GSM8K))
    made = datasets.Dataset.from_list([HUMANEVAL | {"task_id": f"{i}"} for i in range(3)])
    datasets.DatasetDict({"test": made}).save_to_disk(str(folder / "humaneval"))
    return [
        "--data", f"gsm8k={folder / 'gsm8k.jsonl'}", "--data", f"humaneval={folder / 'humaneval'}",
    ]  # fmt: skip


def test_a_table_is_measured_and_gone_on_with(tmp_path, capsys, monkeypatch):
    words = [
        "--table", "d2f-llada", "--tasks", "gsm8k,humaneval", "--limit", "2", *TINY,
        *rows(tmp_path), "--max-new-tokens", "8", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    assert main([*words, "--allow-code-execution"]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    table = read_table("d2f-llada")
    assert list(report["tasks"]) == ["gsm8k", "humaneval"]
    for name, measured in report["tasks"].items():
        assert [row["method"] for row in measured] == list(table.methods)
        for row in measured:
            paper = table.tasks[name].rows[row["method"]].paper
            assert row["paper"] == paper.model_dump() and row["problems"] == 2
            assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
        # One token a forward, and nothing ends early.
        assert measured[0]["figures"]["forwards"] == 2 * 8
        assert measured[0]["against"]["latency"] == 1 and measured[0]["against"]["points"][0] == 0
    for method, adapter in (("base", None), ("d2f", str(ADAPTER))):
        first = (tmp_path / "out" / f"{method}-gsm8k.jsonl").read_text().partition("\n")[0]
        run = json.loads(first)["run"]
        assert run["adapter"] == adapter and run["options"]["stop"] == []
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.strip() in capsys.readouterr().out
    assert "| 52.5 |" in text and "arXiv:2508.09192, Table 1" in text and "CPU" not in text
    # The same command again decodes nothing, and finds the same.
    monkeypatch.setattr("decode.loop._warm_up", lambda *_: pytest.fail("decoded"))
    assert main([*words, "--allow-code-execution"]) == 0
    again = json.loads((tmp_path / "out" / "report.json").read_text())
    for name, measured in report["tasks"].items():
        for row, other in zip(measured, again["tasks"][name], strict=True):
            assert other["decoded"] == 0
            assert all(row[key] == other[key] for key in ("figures", "verdicts", "against"))
    assert main([*words, "--end-early"]) == 2
    assert "is the output of another run" in capsys.readouterr().err


def test_tasks_that_run_code_are_left_out_unless_asked_for(tmp_path, capsys):
    words = [
        "--table", "d2f-dream", "--tasks", "gsm8k-cot,humaneval", "--methods", "base", "--limit",
        "1", "--model", "tiny-teacher", "--max-new-tokens", "4", "--output", str(tmp_path / "out"),
        "--data", f"gsm8k-cot={tmp_path / 'gsm8k.jsonl'}",
    ]  # fmt: skip
    rows(tmp_path)
    # Its eight examples are long: a model with little context says so before any work.
    assert main(words) == 2
    captured = capsys.readouterr()
    assert "humaneval left out: their judge needs --allow-code-execution" in captured.err
    assert "context" in captured.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_response_is_judged_before_its_stop_strings(tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": "#### 4"}))
    spec = read_table("d2f-dream").tasks["gsm8k-cot"]
    inner = make_task("gsm8k-cot", spec, str(path), allow_code_execution=False)
    task, (problem,) = WholeResponse(inner), inner.problems("heldout", 1)
    text = "The answer is 4.\n\nQ: Ann has 9 pens."
    assert task.right(problem, text) and task.answer(text) == "4" and task.stop == ()
    assert not inner.right(problem, text)


def record(text: str, behind: str = "") -> Record:
    """A response, with what was decoded behind its end token."""
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    more = tokenizer()(behind, add_special_tokens=False)["input_ids"]
    raw = [*ids, tokenizer().eos_token_id, *more] if behind else ids
    return Record(
        id=text, task="t", question="?", text=text, right=True, finish_reason="end",
        prompt_tokens=3, max_new_tokens=99, forwards=5, rows=50, counts={}, seconds=2.0,
        tokens=ids, raw_tokens=raw,
    )  # fmt: skip


def count(text: str) -> int:
    return len(tokenizer()(text, add_special_tokens=False)["input_ids"])


def test_the_two_ways_to_count():
    cut = record("Tom has 3.\nQuestion: Ann")
    ended = record("Tom has 3.", behind="Ann buys 4.")
    assert tokenizer().decode(ended.raw_tokens, skip_special_tokens=True) == "Tom has 3.Ann buys 4."
    found = figures([cut, ended], ("Question:",), tokenizer(), cut_at_end=False)
    published = count("Tom has 3.\n") + count("Tom has 3.Ann buys 4.")
    visible = count("Tom has 3.\n") + count("Tom has 3.")
    assert found["published"] == {
        "tokens": published, "length": published / 2, "tps": published / 4,
        "tokens_per_forward": published / 10,
    }  # fmt: skip
    assert found["visible"]["tokens"] == visible and found["latency"] == 2
    assert found["forwards"] == 10
    at_end = figures([cut, ended], ("Question:",), tokenizer(), cut_at_end=True)
    assert at_end["published"] == at_end["visible"] == found["visible"]


def test_a_token_that_spans_a_stop_string_is_not_visible():
    whole = record("Tom has 3 pens")
    place = whole.text.index("en")
    found = figures([whole], ("ens",), tokenizer(), cut_at_end=False)["visible"]["tokens"]
    kept = tokenizer().decode(whole.tokens[:found])
    more = tokenizer().decode(whole.tokens[: found + 1])
    assert len(kept) <= place < len(more)


def test_speed_ups_and_points_against_the_base():
    base = figures([record("Tom has 3.")], (), tokenizer(), cut_at_end=False)
    fast = figures([replace(record("Tom has 3."), seconds=0.5)], (), tokenizer(), cut_at_end=False)
    found = compared([True, True], fast, [True, False], base)
    assert (found["published"], found["visible"], found["latency"]) == (4, 4, 4)
    points, low, high = found["points"]
    assert points == 50 and low < 50 < high
    empty = figures([record("")], (), tokenizer(), cut_at_end=False)
    assert compared([True], fast, [True], empty)["visible"] is None


# The factors of throughput that the paper prints behind its figures.
PRINTED = {
    "d2f-llada": {
        "gsm8k": (1.0, 4.6, 4.9, 7.3), "mbpp": (1.0, 14.4, 17.0, 52.9),
        "humaneval": (1.0, 4.9, 6.9, 29.1), "math": (1.0, 2.3, 2.0, 4.3),
    },
    "d2f-dream": {
        "gsm8k-cot": (1.0, 5.3, 5.2, 9.6), "mbpp": (1.0, 6.9, 7.0, 10.1),
        "humaneval": (1.0, 3.1, 3.0, 3.6), "math": (1.0, 6.6, 6.8, 10.0),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_the_published_figures_agree_with_each_other(name):
    table = read_table(name)
    for task, printed in PRINTED[name].items():
        papers = [row.paper for row in table.tasks[task].rows.values()]
        assert tuple(round(paper.tps / papers[0].tps, 1) for paper in papers) == printed
    assert tables() == sorted(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_every_row_has_a_decoder_and_a_task(name):
    for task_name, task in read_table(name).tasks.items():
        made = make_task(task_name, task, None, allow_code_execution=True)
        assert made.name == task_name and runs_code(task) == (task_name in ("mbpp", "humaneval"))
        for row in task.rows.values():
            settings = row.settings(None, end_early=False)
            settings.check([settings.given["max_new_tokens"]])
            assert settings.given["early_exit"] is False
            assert row.settings(7, end_early=True).given["max_new_tokens"] == 7


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--table"),
        (["--table", "x"], "--table must be one of d2f-dream, d2f-llada, got 'x'"),
        (["--limit", "0"], "--limit must be at least 1, got 0"),
        (["--limit", "99"], "--limit 99: count must be at most 9"),
        (["--tasks", "chess"], "--tasks must be some of gsm8k, mbpp, humaneval, math, each once"),
        (["--methods", "base,base"], "each once, got 'base,base'"),
        (["--data", "gsm8k"], "--data must be TASK=FILE"),
        (["--data", "chess=x"], "--data must be TASK=FILE"),
        (["--data", "math=no.jsonl"], "got 'math=no.jsonl'"),
        (["--model", "tiny-teacher"], "--model tiny-teacher: the table's adapter"),
        (["--tasks", "mbpp"], "mbpp: the judge runs what the model wrote"),
        ([*TINY[:2], "--adapter", "./none"], "none"),
        ([*TINY, "--dtype", "int4"], "dtype must be one of"),
        (["--output", "no/../gsm8k.jsonl"], "it is a file"),
        (["--compile", "--no-merge"], "--compile needs a merged adapter"),
    ],
)
def test_bad_input_is_refused_before_any_work(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no").mkdir()
    rows(tmp_path)
    monkeypatch.setattr(
        benchmarks.paper.run_table, "load", lambda options: pytest.fail("loaded a model")
    )
    usual = ["--table", "d2f-llada"] if words else []
    tasks = [] if "--tasks" in words else ["--tasks", "gsm8k"]
    data = ["--data", "gsm8k=gsm8k.jsonl"] if "--tasks" not in words else []
    assert main([*usual, *tasks, *data, *words]) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("error: ") and said in last and not captured.out
    assert not (tmp_path / "runs" / "paper-d2f-llada").exists()


def test_rows_without_the_columns_are_named(tmp_path, capsys):
    path = tmp_path / "other.jsonl"
    path.write_text('{"text": "?"}\n')
    words = ["--table", "d2f-llada", "--tasks", "gsm8k", "--data", f"gsm8k={path}", *TINY]
    assert main([*words, "--output", str(tmp_path / "out")]) == 2
    assert "'question' is undefined" in capsys.readouterr().err


def test_data_that_is_not_there(capsys):
    words = ["--table", "d2f-llada", "--tasks", "gsm8k", "--data", "gsm8k=no.jsonl", *TINY]
    assert main(words) == 2
    assert "error: --data: no.jsonl: there is no such file" in capsys.readouterr().err


def test_ending_early_changes_what_is_waited_for_and_nothing_that_is_seen(tmp_path):
    asked = "Tom has {} nuts. He eats 1 of them. How many nuts has Tom now?"
    path = tmp_path / "short.jsonl"  # which the tiny models answer in few tokens
    rows = [{"question": asked.format(i), "answer": f"#### {i - 1}"} for i in range(2, 12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "--table", "d2f-llada", "--tasks", "gsm8k", "--methods", "fast-dllm-dual,d2f", "--limit",
        "2", *TINY, "--data", f"gsm8k={path}", "--max-new-tokens", "96",
    ]  # fmt: skip
    found = []
    for more in ([], ["--end-early"]):
        folder = tmp_path / f"out{len(found)}"
        assert main([*words, *more, "--output", str(folder)]) == 0
        found.append(json.loads((folder / "report.json").read_text())["tasks"]["gsm8k"])
    for whole, early in zip(*found, strict=True):
        assert whole["verdicts"] == early["verdicts"]
        assert whole["figures"]["visible"]["tokens"] == early["figures"]["visible"]["tokens"]
        assert early["figures"]["forwards"] <= whole["figures"]["forwards"]
    (fast, _), (ended, _) = found
    assert ended["figures"]["forwards"] < fast["figures"]["forwards"]


def test_a_process_that_judges_a_table_loads_no_torch():
    """Each imports what the task that it is sent is made of, for one response or many."""
    code = "import sys, benchmarks.paper.paper_tasks; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
