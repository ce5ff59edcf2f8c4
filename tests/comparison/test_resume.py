"""A comparison that was killed goes on: nothing complete is lost or measured again, and what is
compared was measured side by side."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from d2f.errors import InputError
from decode.compare.__main__ import main, plan
from decode.compare.report import ComparisonReport, Judged, Record, RunsLedger
from tests.comparison.endpoint import answering, endpoint
from tests.comparison.test_server import gone

ROOT = Path(__file__).parents[2]
BASE = {"name": "base", "kind": "vllm", "model": "tiny-ar", "stream": False}
REPETITIONS, PROBLEMS, ALL = 3, 2, 4


def configuration(folder, python, url):
    remote = {
        "name": "remote", "kind": "endpoint", "url": url, "model": "served",
        "tokenizer": "tiny-ar",
    }  # fmt: skip
    values = {
        "output": str(folder / "out"), "entries": [BASE, remote], "tasks": ["story"],
        "problems": PROBLEMS, "accuracy_problems": ALL, "repetitions": REPETITIONS,
        "warmup": 1, "vllm_python": python, "figures": False,
    }  # fmt: skip
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.slow
def test_a_killed_comparison_goes_on(tmp_path, fake_python, capsys):
    """Killed in the endpoint's second repetition, whose first half is complete: that half comes
    again, so that the two are still compared in one breath."""
    reached, good = threading.Event(), answering(lambda body: "#### 7")

    def behave(handler, body, number):
        if number == 1 + PROBLEMS and not reached.is_set():  # the warm-up of its second repetition
            reached.set()
            return
        good(handler, body, number)

    ledger, log = tmp_path / "out" / "measurements.jsonl", tmp_path / "out" / "logs" / "base.log"
    with endpoint(behave) as server:
        path = configuration(tmp_path, fake_python, server.url)
        command = [sys.executable, "-m", "decode.compare", "--config", path]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) as process:
            assert reached.wait(100)
            process.send_signal(signal.SIGKILL)
        assert gone(log)
        kept = ledger.read_bytes().splitlines()
        assert len(kept) == 1 + 3  # the header; both at first, then base
        ledger.write_bytes(ledger.read_bytes() + kept[-1][:20])  # and a kill within a line

        before = ledger.read_bytes()
        assert main(["--config", path, "--entries.base.stream", "true"]) == 2
        said = capsys.readouterr().err
        assert "another run: entries.base.stream was False, now True; nothing" in said
        assert ledger.read_bytes() == before

        asked = len(server.bodies)
        assert main(["--config", path]) == 0
        assert len(server.bodies) - asked == 2 * (1 + PROBLEMS) + ALL  # not what was kept
    assert "2 runs are already in" in capsys.readouterr().out
    report = ComparisonReport.load(tmp_path / "out" / "report.json")
    runs = [(str(r.repetition), r.entry) for r in report.records]
    assert sorted(runs) == [(n, e) for n in ("0", "1", "2", "None") for e in ("base", "remote")]
    assert [(r["kept"], r["dropped"]) for r in report.about["resumed"]] == [(2, 1)]
    assert "**Resumed** at 20" in (tmp_path / "out" / "report.md").read_text()
    assert not ledger.exists()
    assert main(["--config", path]) == 2 and "holds a report" in capsys.readouterr().err


def record(entry, workload="story", concurrency=1, repetition=0, seconds=1.5):
    answer = Judged(0, 0.0, None, None, 2.0, 1, 3, 4, 5, 6, 1, True, "text", None, {"drafts": 2})
    return Record(entry, workload, concurrency, repetition, seconds, 2, None, [answer])


@given(
    names=st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True),
    concurrency=st.sampled_from([(1,), (1, 4)]),
    repetitions=st.integers(1, 3),
    kills=st.lists(st.integers(0, 20), max_size=3),
)
def test_wherever_it_is_killed(tmp_path_factory, names, concurrency, repetitions, kills):
    """Each run is there once, in its order, and the entries of a repetition were measured in one
    go; which one is told by the seconds here."""
    config = SimpleNamespace(
        accuracy_concurrency=None, concurrency=concurrency, repetitions=repetitions, warmup=1
    )
    contestants = [SimpleNamespace(entry=SimpleNamespace(name=name)) for name in names]
    works = [
        SimpleNamespace(name=task, items=[1, 2], timed=lambda concurrency: 1)
        for task in ("story", "sudoku")
    ]
    path = tmp_path_factory.mktemp("ledger") / "measurements.jsonl"
    whole = [p for p in plan(config, contestants, works) if not p.warmup]
    done = times = 0
    for go, kill in enumerate([*kills, 10**6]):
        ledger = RunsLedger(path, {"seed": 0})
        times = times + 1 if done else 0  # that it went on from something
        ledger.begin(names)
        assert len(ledger.records) <= done and len(ledger.resumed) == times
        runs = plan(config, contestants, works, ledger.done)
        assert not runs or runs[-1].warmup is False
        for planned in [p for p in runs if not p.warmup][:kill]:
            name = planned.contestant.entry.name
            place = planned.workload.name, planned.concurrency, planned.repetition
            ledger.add_record(record(name, *place, seconds=go))
        done = len(ledger.records)
        ledger.close()
    assert RunsLedger(path, {"seed": 0}).records == ledger.records
    assert [r.key for r in ledger.records] == [
        (p.workload.name, p.concurrency, p.repetition, p.contestant.entry.name) for p in whole
    ]
    timed = [r for r in ledger.records if r.repetition is not None]
    goes = {(r.workload, r.concurrency, r.repetition, r.seconds) for r in timed}
    assert len(goes) * len(names) == len(timed)


def test_one_that_failed_at_its_start_refuses_no_other(tmp_path):
    """A mistake in the settings can be put right without another output."""
    path = tmp_path / "measurements.jsonl"
    with RunsLedger(path, {"seed": 0}) as ledger:
        ledger.begin(["a"])
    with RunsLedger(path, {"seed": 1}) as corrected:
        corrected.begin(["a"])
        corrected.add_record(record("a"))
    with pytest.raises(InputError, match="seed was 1, now 0; nothing was written"):
        RunsLedger(path, {"seed": 0})


def test_settings_machine_prompts_and_models_decide(tmp_path):
    from decode.compare.config import identity, read_config

    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    options = tmp_path / "options.yaml"
    options.write_text("tau_conf: 0.9\n")
    ours = {"name": "D2F", "kind": "ours", "model": str(model), "config": str(options)}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({"output": "o", "entries": [ours], "tasks": ["story"]}))

    def found(*flags, question="1+1", device="x"):
        item = SimpleNamespace(id="1", prompt=question)
        about = {"device": device, "versions": {"torch": "1"}}
        config = read_config(path, flags)
        return json.loads(json.dumps(identity(config, [SimpleNamespace(items=[item])], about)))

    def changed(*flags, **more):
        now = found(*flags, **more)
        return {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}

    before = found()
    assert changed("--output", "p", "--figures", "false") == set()
    assert changed("--seed", "1", "--limits.silence", "3") == {"seed", "limits.silence"}
    assert changed("--entries.D2F.options.tau_add", "0.1") == {
        "entries.D2F.options", "entries.D2F.options.tau_add",
    }  # fmt: skip
    assert changed(question="1+2", device="y") == {"prompts", "device"}
    options.write_text("tau_conf: 0.8\n")
    assert changed() == {f"content of {options}"}
    (model / "config.json").write_text("{ }")
    assert changed() == {f"content of {options}", f"files of {model}"}
