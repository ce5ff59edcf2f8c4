"""The command: recorded, simulated, and checked against servers that answer."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from benchmarks.fleet.__main__ import main
from benchmarks.fleet.fleet_check import Servers, measured_overheads
from benchmarks.fleet.fleet_plan import Load, drawn, serve
from benchmarks.fleet.forward_time import ForwardTime
from benchmarks.fleet.recording import Recording, Trace
from benchmarks.fleet.simulation import Overheads
from d2f.errors import InputError
from tests.comparison.endpoint import answering, endpoint

TIME = ForwardTime(kind="measured", points=((1, 1.0), (32, 2.0)))
FORWARDS = ([(20, 0, 0), (4, 20, 4)], [(30, 0, 0), (4, 30, 1), (4, 34, 4)], [(9, 0, 2)])
TRACES = tuple(
    Trace(prompt=(n, 5), text=f"w{n} end", right=True, forwards=tuple(forwards))
    for n, forwards in enumerate(FORWARDS)
)


def recording(name="D2F"):
    about = {"task": "story", "device": "a CPU", "threads": 1, "date": "2026-01-01"}
    return Recording(
        name=name, model="served", options={"decoder": "d2f"}, max_new_tokens=8, about=about,
        time=TIME, traces=TRACES,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """With two recordings."""
    for name in ("D2F", "autoregressive"):
        recording(name).save(tmp_path / f"{name.lower()}.json")
    return tmp_path


def run(folder, *more):
    return main(["--folder", str(folder), "--ways", "D2F", "autoregressive", *more])


SMALL = ("--replicas", "1", "3", "--requests", "100", "--horizon", "1")


def test_a_report_a_table_and_a_figure(folder, capsys):
    assert run(folder, *SMALL, "--latency-ms", "30") == 0
    out = capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    kinds = [(r["way"], r["arrivals"], r["router"], r["replicas"]) for r in report["rows"]]
    one_way = [
        (arrivals, router, count)
        for arrivals in ("Poisson", "bursty")
        for router, count in (("least", 1), ("least", 3), ("random", 3))
    ]
    assert kinds == [(way, *rest) for way in ("D2F", "autoregressive") for rest in one_way]
    assert all(0 < row["rate"] < row["capacity"] for row in report["rows"])
    assert all(row["seen"]["latency_95"] <= 30 for row in report["rows"])
    assert report["target"] == {"latency_ms": 30, "first_ms": 200}
    assert report["forward"] == "measured, as recorded"
    assert len(re.findall(r"^\| (?:D2F|autoregressive) ", out, flags=re.MULTILINE)) == len(kinds)
    assert (folder / "fleet.png").stat().st_size > 10_000


def test_a_floor_is_called_one_in_all_that_is_written(folder):
    few = ("--replicas", "1", "--requests", "100", "--horizon", "1", "--arrivals", "Poisson")
    assert run(folder, *few, "--floor", "LLaDA-8B", "--gpu", "A100") == 0
    report = json.loads((folder / "report.json").read_text())
    assert "estimated floor of LLaDA-8B in bf16 on an A100, not measured" in report["forward"]
    assert {r["time"]["kind"] for r in report["recordings"]} == {"estimated floor"}


def test_a_model_of_ones_own_is_recorded_with_its_options(tmp_path, capsys):
    options = tmp_path / "options.yaml"
    options.write_text("decoder: d2f\nblock_size: 4\ntau_conf: 0.5\n")
    given = ("--model", "tiny-d2f", "--config", str(options), "--task", "sudoku", "--problems", "2")
    folder = tmp_path / "made"
    few = ("--ways", "D2F", "--max-batch", "2")
    assert main(["--record", "--folder", str(folder), *few, *given]) == 0
    found = Recording.load(folder / "d2f.json")
    assert found.about["task"] == "sudoku" and found.max_new_tokens == 32
    assert found.options["decoder"] == "d2f" and found.options["tau_conf"] == 0.5
    said = capsys.readouterr().out
    assert "2 held-out sudoku problems" in said and said.count("ms a forward") == 2


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--replicas", "0"), "expected more than 0"),
        (("--latency-ms", "nan"), "expected more than 0"),
        (("--http-ms", "-1"), "expected at least 0"),
        (("--model", "m"), "--model is for one of --ways, got D2F, autoregressive"),
        (("--config", "c"), "--config is for a --model"),
        (("--record", "--task", "nothing"), "expected a task among story"),
        (("--max-batch", "0"), "--max-batch must be at least 1, got 0"),
        (("--record", "--check", "http://h"), "expected one of them"),
        (("--floor", "small", "--time", "f"), "expected one of them"),
        (("--floor", "nothing"), "nothing"),
        (("--time", "nothing.json"), "nothing.json: cannot be read"),
        (("--ways", "WeDLM"), "wedlm.json: cannot be read"),
        (("--check", "http://127.0.0.1:9"), "http://127.0.0.1:9/v1: no endpoint answers there"),
    ],
)
def test_bad_input_is_an_error_and_nothing_is_written(flags, says, folder, capsys):
    before = sorted(folder.iterdir())
    assert run(folder, *SMALL, *flags) == 2
    assert says in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


def test_a_check_sends_what_was_recorded_and_prints_both(folder, capsys):
    with (
        endpoint(answering(lambda body: f"w{body['prompt'][0]} end")) as a,
        endpoint(answering(lambda body: f"w{body['prompt'][0]} end")) as b,
    ):
        few = ("--light", "3", "--loads", "0.05", "0.1", "--seconds", "1.5")
        assert run(folder, "--ways", "D2F", "--check", a.url, b.url.removesuffix("/v1"), *few) == 0
        asked = a.bodies + b.bodies
        assert {tuple(body["prompt"]) for body in asked} == {trace.prompt for trace in TRACES}
        assert all((body["decoder"], body["max_tokens"]) == ("d2f", 8) for body in asked)
        assert len(b.bodies) > 4, "the second one had more than what warms it"
    found = json.loads((folder / "check-d2f.json").read_text())
    assert [row["load"] for row in found["loads"]] == ["one at a time", "0.05", "0.1"]
    assert found["replicas"] == 2 and set(found["overheads"]) == {"http_ms", "event_ms"}
    for row in found["loads"]:
        assert set(row["measured"]) == set(row["simulated"])
        assert 0 < row["measured"]["first_95"] <= row["measured"]["latency_95"]
    assert capsys.readouterr().out.count("measured / simulated") == 3


def test_the_check_sends_to_whom_has_least_to_do():
    """Of two that have nothing to do the first, again and again."""
    right = answering(lambda body: f"w{body['prompt'][0]} end")
    with endpoint(right) as a, endpoint(right) as b:
        Servers.at([a.url, b.url], recording()).run(TRACES, None)
        assert (len(a.bodies), len(b.bodies)) == (3, 0)


@pytest.mark.parametrize("text", ["other", None])
def test_a_server_that_answers_otherwise_or_fails_ends_the_check(text, folder, capsys):
    def answer(body):
        if text is None:
            raise ValueError("it fails")
        return text

    with endpoint(answering(answer)) as server:
        assert run(folder, "--ways", "D2F", "--check", server.url) == 2
    said = capsys.readouterr().err
    assert "'w0 end' was recorded" in said if text else "requests failed" in said
    assert not (folder / "check-d2f.json").exists()


def test_what_the_server_adds_is_read_off_requests_that_were_alone():
    """The simulation's own answers stand in for a server's: what was put in is found again."""
    known = recording()
    added = Overheads(http_ms=3.0, event_ms=0.5)
    alone = serve(known, Load(1, overheads=added), 10 * np.arange(9))
    found = measured_overheads(drawn(known, 9, 0), alone, known.time)
    assert (found.http_ms, found.event_ms) == pytest.approx((3.0, 0.5), abs=1e-5)


def test_a_server_of_another_model_is_refused():
    with endpoint(answering()) as server, pytest.raises(InputError, match="serves served, not"):
        Servers.at([server.url], recording().model_copy(update={"model": "other"}))
