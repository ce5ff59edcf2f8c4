"""Judging in processes: the verdicts of the plain way, in order, whatever one response does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from importlib.util import find_spec

import pytest
from judged_responses import PROBLEM, MadeUp

from d2f.config import dump
from d2f.errors import InputError, RequestError
from d2f.tasks import find_task
from decode import loop
from decode.decoders import find_decoder
from decode.evaluate import main
from decode.jobs import Job, Source
from decode.judging import JudgePool
from decode.ledger import Ledger
from decode.step import Event, Result
from decode.workers import OneWorker


@pytest.fixture(scope="module")
def pool():
    with JudgePool(2) as pool:
        yield pool


def asked(*texts: str, **keys: object) -> list:
    return [(MadeUp(**keys), PROBLEM, text) for text in texts]


def test_verdicts_come_in_order(pool):
    texts = ["slow", "no", "yes", "slow", "no", "no", "yes"]
    for _ in range(2):  # the processes serve again
        assert pool.right(asked(*texts)) == [text in ("yes", "slow") for text in texts]
    assert pool.right([]) == []
    here = f"process {os.getpid()}"
    assert pool.right([*asked(here, judging_seconds=None), *asked(here)]) == [True, False]


def test_a_crash_and_a_hang_are_wrong_and_hurt_no_other(pool):
    failed = pool.failed
    hang = asked("hang", judging_seconds=0.5)
    assert pool.right([*asked("yes", "crash", "yes"), *hang, *asked("yes")]) == [1, 0, 1, 0, 1]
    assert pool.failed == failed + 2


def test_a_judge_that_raises_ends_the_command(pool):
    with pytest.raises(InputError, match=r"^made-up: ZeroDivisionError: no$"):
        pool.right(asked("yes", "raise", "hang"))
    assert pool.right(asked("yes")) == [True]


def test_an_interrupt_ends_it_and_its_processes():
    before = set(multiprocessing.active_children())
    with JudgePool(2) as own:
        own.right(asked("yes", "yes"))
        assert set(multiprocessing.active_children()) - before
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            own.right(asked("hang", "hang"))
        assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("judge", ["python", "math"])
def test_the_judges_that_take_long_are_judged_in_processes(pool, tmp_path, judge):
    if judge == "math" and find_spec("math_verify") is None:
        pytest.skip("math-verify is missing")
    options = {"name": judge} | ({"tests": "assert x == 2"} if judge == "python" else {})
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "?", "answer": "2"}))
    values = {"data": "rows.jsonl", "splits": {"heldout": 1.0}, "judge": options}
    (tmp_path / "mine.yaml").write_text(dump(values))
    task = find_task(str(tmp_path / "mine.yaml"), allow_code_execution=True)
    (problem,) = task.problems("heldout", 1)
    assert task.judging_seconds is not None
    texts = ["x = 2", "x = 3", "import os; os._exit(0)", r"\boxed{", "x = 2"]
    found = pool.right([(task, problem, text) for text in texts])
    assert found == [task.right(problem, text) for text in texts] == [1, 0, 0, 0, 1]


def test_answers_that_wait_for_their_judge_are_kept_where_a_request_fails(tmp_path, monkeypatch):
    decoder = find_decoder("d2f")(max_new_tokens=16)
    jobs = [Job(Source(n, str(n), "?", PROBLEM, MadeUp()), [5, 6], decoder) for n in range(3)]
    result = Result([7], [7], "yes", 1, [(2, 0)], 0.1, "end", prompt_tokens=2)
    events = [Event(n, 1, [], [], result) for n in (0, 1)]
    failed = Result([], [], "", 1, [], 0.1, "error", 2, error=RequestError("broken"))
    events.append(Event(2, 1, [], [], failed))
    monkeypatch.setattr("decode.api.stream", lambda *_, **__: iter(events))
    monkeypatch.setattr(loop, "_warm_up", lambda *_: None)
    ledger = Ledger(tmp_path / "answers.jsonl", {})
    with JudgePool(8) as pool, pytest.raises(RequestError, match=r"^2: broken"):
        loop.decode_jobs(OneWorker(None), jobs, batch_size=3, ledger=ledger, judges=pool)
    assert {name: row["right"] for name, row in ledger.rows.items()} == {0: True, 1: True}


def test_the_command_gives_the_verdicts_of_the_pool(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{i}?", "answer": "", "test": f"assert {i % 2}"} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = {"name": "python", "program": "# {{ question }}", "tests": "{{ test }}"}
    values = {"data": "rows.jsonl", "splits": {"heldout": 1.0}, "judge": judge}
    (tmp_path / "mine.yaml").write_text(dump(values))
    command = ["--tasks", "mine.yaml", "--allow-code-execution", "--max-new-tokens", "8"]
    assert main([*command, "--judge-jobs", "3", "--output", "out"]) == 0
    lines = (tmp_path / "out" / "answers.jsonl").read_text().splitlines()[1:]
    found = [(line["question"], line["right"]) for line in map(json.loads, lines)]
    assert sorted(found) == [(f"{i}?", bool(i % 2)) for i in range(5)]
