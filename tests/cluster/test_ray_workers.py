"""Several workers give what one gives: every command with work that crosses to other processes, and
a real Ray, which is started once, where a worker or the command is killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import items
import psutil
import pytest
from batch_runs import ROWS, answered, command, files, write_rows

from d2f.errors import InputError, NonFiniteLogitsError
from decode import batch, evaluate, tune
from decode import workers as module
from decode.batch import parse
from decode.workers import OneWorker, RayWorkers, ray_session
from distill import rollouts

PATHS = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # for `items`
SUDOKU = ["--tasks", "sudoku", "--problems"]


def sent(value):
    """What another process gets of it."""
    return pickle.loads(pickle.dumps(value))


class FarWorkers(OneWorker):
    """Workers as Ray's, but in this process: they are sent chunks, and send back results."""

    def __init__(self, options, count, cores, gpus):
        super().__init__(*module.load(sent(options)), options)
        self.count = count

    def ask(self, function, *arguments):
        return sent(super().ask(*sent((function, *arguments))))

    def map(self, work, items, size):
        rest = iter(items)
        while chunk := list(islice(rest, size)):
            yield from sent(list(super().map(sent(work), sent(chunk), size)))

    def close(self):
        pass


@pytest.fixture
def far(monkeypatch):
    monkeypatch.setattr(module, "ray_session", lambda *_: nullcontext((1, 0)))
    monkeypatch.setattr(module, "RayWorkers", FarWorkers)


def test_two_workers_evaluate_as_one_and_go_on_where_one_stopped(far, saved, tmp_path):
    words = ["--model", saved, *SUDOKU, "8", "--batch-size", "2"]
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


def test_two_workers_collect_the_rollouts_of_one_in_their_order(far, saved, tmp_path):
    words = ["--model", "tiny-teacher", *SUDOKU, "12"]
    words += ["--batch-size", "2", "--block-size", "8", "--temperatures", "0,0.5"]
    for name, more in (("one", []), ("two", ["--workers", "2"])):
        assert rollouts.main([*words, "--output", str(tmp_path / name), *more]) == 0
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    assert len((tmp_path / "one").read_bytes().splitlines()) > 1


def test_two_workers_measure_what_one_does_but_for_the_time(far, saved, tmp_path):
    words = ["--model", saved, *SUDOKU, "4", "--heldout", "4", "--repetitions", "2"]
    words += ["--search", "grid", "--no-figures", "--block-size", "4"]
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
    assert two[0] == {**one[0], "workers": 2}
    assert tune.main([*words, "--output", str(tmp_path / "two")]) == 2  # other speeds


@pytest.fixture(scope="module")
def options(saved):
    return parse(command(saved, Path("rows.jsonl"), Path("out"), "--device", "cpu"))


@pytest.fixture(scope="module")
def crew(options):
    """Two workers on a Ray."""
    with pytest.MonkeyPatch.context() as patch:
        # Threads are shared out where nobody set their number.
        patch.delenv("OMP_NUM_THREADS", raising=False)
        patch.setenv("PYTHONPATH", PATHS)
        patch.setattr(module, "RESTARTS", 1)
        with ray_session(None, 2, "--workers", "cpu"):
            found = RayWorkers(options, 2, 1, 0)
            yield found
            found.close()


@pytest.mark.slow
@pytest.mark.xdist_group("ray")  # one after another: each starts a Ray of its own
# Not importorskip: the session sets what Ray reads when it is imported.
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is missing")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
class TestOnRay:
    def test_a_worker_that_dies_is_replaced_and_nothing_is_lost_or_given_twice(
        self, crew, tmp_path
    ):
        assert crew.ask(items.process) not in (os.getpid(), None)
        work = partial(items.doubled, deaths=tmp_path, kills={13: 1})
        found = list(crew.map(work, ((f"key {n}", n) for n in range(20)), 4))
        assert sorted(found) == sorted((f"key {n}", 2 * n) for n in range(20))
        assert len(list(tmp_path.iterdir())) == 1

    def test_an_error_is_raised_as_it_was_and_dying_ends_the_command(self, crew, options, tmp_path):
        with pytest.raises(NonFiniteLogitsError, match=r"^item 3$"):
            list(crew.map(items.failing, ((n, n) for n in range(8)), 4))
        dies = r"^a worker died and was restarted 1 times[^\n]*$"
        with pytest.raises(InputError, match=dies):  # as it loads
            RayWorkers(Namespace(**vars(options), deadly=items.Deadly()), 1, 0, 0)
        work = partial(items.doubled, deaths=tmp_path, kills={5: 9})
        with pytest.raises(InputError, match=dies):
            list(crew.map(work, ((n, n) for n in range(8)), 4))

    @pytest.mark.parametrize(("how", "count"), [(signal.SIGINT, "2"), (signal.SIGKILL, "1")])
    def test_a_command_that_is_stopped_leaves_no_process_and_goes_on_as_one_worker_would(
        self, saved, tmp_path, how, count
    ):
        rows = write_rows(tmp_path / "rows.jsonl")
        one = answered(saved, rows, tmp_path / "one", "--temperature", "0.9")
        words = command(saved, rows, tmp_path / "two", "--temperature", "0.9", "--workers", count)
        slow = f"import slow_rows; from decode.batch import main; raise SystemExit(main({words}))"
        running = subprocess.Popen(
            [sys.executable, "-c", slow],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": PATHS},
        )
        ledger = tmp_path / "two" / "ledger.jsonl"
        while running.poll() is None and not (
            ledger.exists() and ledger.read_bytes().count(b"\n") >= 4
        ):
            time.sleep(0.1)
        assert running.poll() is None, running.stderr.read()
        started = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(how)
        _, said = running.communicate(timeout=60)
        assert running.returncode == (130 if how == signal.SIGINT else -how)
        assert how == signal.SIGKILL or "interrupted; what is answered stays" in said
        _, alive = psutil.wait_procs(started, timeout=60)
        assert alive == []
        assert 3 <= ledger.read_bytes().count(b"\n") - 1 < len(ROWS)
        assert batch.main([*words, "--workers", "1"]) == 0
        assert files(tmp_path / "two") == one
