"""Several workers on a real Ray, which is started once: the same results as one worker gives, also
where a worker or the command is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import items
import psutil
import pytest
from batch_runs import ROWS, answered, command, files, write_rows

from d2f.errors import InputError, NonFiniteLogitsError
from decode import batch, evaluate, tune
from decode.batch import parse
from decode.workers import RayWorkers, ray_session
from distill import rollouts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),  # one after another: each starts a Ray of its own
    # Not importorskip: the session sets what Ray reads when it is imported.
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is missing"),
]
HERE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Ray for this module, which its commands find running and use."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two workers need two cores")
    with pytest.MonkeyPatch.context() as patch:
        # Threads are shared out where nobody set their number.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))  # for `items`
        with ray_session(None, 2, "--workers"):
            yield


@pytest.fixture(scope="module")
def options(saved):
    return parse(command(saved, Path("rows.jsonl"), Path("out"), "--device", "cpu"))


@pytest.fixture(scope="module")
def crew(cluster, options):
    found = RayWorkers(options, 2, 0, 0)  # no cores: the commands beside it want them all
    yield found
    found.close()


@pytest.mark.parametrize("kills", [{}, {0: 1, 13: 1, 19: 1}])
def test_a_worker_that_dies_is_replaced_and_nothing_is_lost_or_given_twice(crew, tmp_path, kills):
    work = partial(items.doubled, deaths=tmp_path, kills=kills)
    found = list(crew.map(work, ((f"key {n}", n) for n in range(20)), 4))
    assert sorted(found) == sorted((f"key {n}", 2 * n) for n in range(20))
    assert len(list(tmp_path.iterdir())) == len(kills)


def test_a_worker_that_dies_as_it_loads_is_an_error_in_one_line(cluster, options):
    with pytest.raises(InputError, match=r"^a worker died and was restarted") as error:
        RayWorkers(Namespace(**vars(options), deadly=items.Deadly()), 1, 0, 0)
    assert "\n" not in str(error.value)


def test_an_error_of_a_worker_is_raised_as_it_was_and_dying_ends_the_command(crew, tmp_path):
    assert crew.ask(items.process) not in (os.getpid(), None)
    with pytest.raises(NonFiniteLogitsError, match=r"^item 3$"):
        list(crew.map(items.failing, ((n, n) for n in range(8)), 4))
    work = partial(items.doubled, deaths=tmp_path, kills={5: 9})
    with pytest.raises(InputError, match=r"^a worker died and was restarted 3 times"):
        list(crew.map(work, ((n, n) for n in range(8)), 4))


def test_two_workers_answer_as_one(saved, tmp_path):
    rows, more = write_rows(tmp_path / "rows.jsonl"), ("--temperature", "0.9")
    one = answered(saved, rows, tmp_path / "one", *more)
    assert answered(saved, rows, tmp_path / "two", *more, "--workers", "2") == one


def test_two_workers_evaluate_as_one_and_go_on_where_one_stopped(saved, tmp_path):
    words = ["--model", saved, "--tasks", "sudoku", "--problems", "8", "--batch-size", "2"]
    words += ["--max-new-tokens", "16", "--block-size", "4", "--temperature", "0.9"]

    def found(folder: Path, *more: str) -> tuple:
        assert evaluate.main([*words, "--output", str(folder), *more]) == 0
        header, *lines = map(json.loads, (folder / "answers.jsonl").read_text().splitlines())
        row = json.loads((folder / "report.json").read_text())["rows"][0]
        counted = {k: v for k, v in row.items() if k not in ("seconds", "decoded", "workers")}
        answers = {line["id"]: {**line, "seconds": None} for line in lines}
        return header, answers, counted, row["decoded"], row["workers"]

    *one, decoded, count = found(tmp_path / "one")
    assert (decoded, count) == (8, 1)
    lines = (tmp_path / "one" / "answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "answers.jsonl").write_text("".join(lines[:4]))
    assert found(tmp_path / "two", "--workers", "2") == (*one, 5, 2)


def test_two_workers_collect_the_rollouts_of_one_in_their_order(saved, tmp_path):
    words = ["--model", "tiny-teacher", "--tasks", "sudoku", "--problems", "12"]
    words += ["--batch-size", "2", "--block-size", "8", "--temperatures", "0,0.5"]
    for name, more in (("one", []), ("two", ["--workers", "2"])):
        assert rollouts.main([*words, "--output", str(tmp_path / name), *more]) == 0
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert len((tmp_path / "one").read_bytes().splitlines()) > 1


def test_two_workers_measure_what_one_does_but_for_the_time(saved, tmp_path):
    words = ["--model", saved, "--tasks", "sudoku", "--search", "grid", "--problems", "4"]
    words += ["--heldout", "4", "--repetitions", "2", "--no-figures", "--block-size", "4"]
    words += ["--tau-add", "0.1", "--tau-act", "0.5,1", "--tau-conf", "0.1,0.5"]

    def found(name: str, *more: str) -> tuple:
        assert tune.main([*words, "--output", str(tmp_path / name), *more]) == 0
        text = (tmp_path / name / "measurements.jsonl").read_text()
        header, *lines = map(json.loads, text.splitlines())
        # Which ones are measured in the end follows from the speeds.
        searched = [line for line in lines if " tuning " in line["id"]]
        counts = {x["id"]: (x["right"], x["tokens"], x["forwards"]) for x in searched}
        return header["run"], counts

    one, two = found("one"), found("two", "--workers", "2")
    assert two[1] == one[1] and len(one[1]) == 4
    assert two[0].pop("workers") == 2
    different = {key for key in one[0] if one[0][key] != two[0][key]}
    assert different <= {"threads"}
    assert two[0]["threads"] == len(os.sched_getaffinity(0)) // 2
    assert tune.main([*words, "--output", str(tmp_path / "two")]) == 2  # other speeds


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_is_stopped_leaves_no_process_and_is_gone_on_with(saved, tmp_path, how):
    rows = write_rows(tmp_path / "rows.jsonl")
    more = ("--temperature", "0.9")
    whole = answered(saved, rows, tmp_path / "whole", *more)
    words = command(saved, rows, tmp_path / "out", *more, "--workers", "2")
    slow = f"import slow_rows; from decode.batch import main; raise SystemExit(main({words}))"
    running = subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True)
    ledger = tmp_path / "out" / "ledger.jsonl"
    while running.poll() is None and (not ledger.exists() or ledger.read_bytes().count(b"\n") < 4):
        time.sleep(0.1)
    assert running.poll() is None, running.stderr.read()
    started = psutil.Process(running.pid).children(recursive=True)
    # Ray's own, which hold no model and outlive a kill -9 of who started them for a while.
    agents = [process for process in started if "Agent" in process.cmdline()[0]]
    assert len(agents) < len(started)
    running.send_signal(how)
    _, said = running.communicate(timeout=60)
    assert running.returncode == (130 if how == signal.SIGINT else -how)
    assert how == signal.SIGKILL or "interrupted; what is answered stays" in said
    workers = [process for process in started if process not in agents]
    _, alive = psutil.wait_procs(started if how == signal.SIGINT else workers, timeout=60)
    assert alive == []
    kept = ledger.read_bytes().count(b"\n") - 1
    assert 3 <= kept < len(ROWS)
    assert batch.main(words) == 0
    assert files(tmp_path / "out") == whole
