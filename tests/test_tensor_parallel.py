"""A model in parts on two gloo processes decodes what it decodes whole; who dies takes the others
along; and what cannot be shared is refused before weights are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from every_decoder import KINDS
from test_train_processes import finish, free_ports, start
from tiny import tokenizer

import d2f
import decode
from d2f.convert import build
from d2f.errors import CheckpointError, InputError
from d2f.saving import save_model
from decode import evaluate, pipeline, serve

pytestmark = pytest.mark.xdist_group("tensor parallel")  # one worker, one set of its fixtures

PROCESS = str(Path(__file__).parent / "parallel_process.py")
SECONDS_TO_END = 10.0


def of_shape(family: str, kv_heads: int, **more):
    torch.manual_seed(1)
    return build(
        family, tokenizer(), hidden_size=32, intermediate_size=64, layers=2, heads=4,
        kv_heads=kv_heads, context_length=256, initializer_range=0.3, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory, golden) -> dict[str, tuple[str, str, str | None]]:
    """By name: folder, kind of `every_decoder.KINDS`, adapter. Those of KINDS have 4 heads over 2
    key-value heads."""
    folder = tmp_path_factory.mktemp("models")
    made = {name: (make(), name) for name, (make, _) in KINDS.items()}
    made["ungrouped llada"] = of_shape("llada", 4), "llada"
    made["ungrouped dream"] = of_shape("dream", 4), "dream"
    made["tied"] = of_shape("dream", 2, tie_word_embeddings=True), "dream"
    for name, (model, _) in made.items():
        save_model(model, folder / name, dtype=torch.float32)
    found = {name: (str(folder / name), kind, None) for name, (_, kind) in made.items()}
    official = str(golden / "llada-tiny")
    return found | {"official": (official, "llada student", f"{official}/adapter")}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict:
    """What one pair of processes found of all of them."""
    place = tmp_path_factory.mktemp("jobs") / "jobs.json"
    place.write_text(json.dumps({"models": models, "show": "official"}))
    finish(start([PROCESS, str(place)], 2, free_ports(1)))
    return json.loads(place.with_suffix(".result").read_text())


@pytest.mark.slow
def test_it_decodes_what_the_whole_model_decodes(results, models):
    """The same tokens in the same forwards: every family and decoder, grouped heads and not, tied
    embeddings, a merged adapter."""
    assert set(results["differ"]) == set(models)
    assert {name: differ for name, (_, differ) in results["differ"].items() if differ} == {}
    assert min(count for count, _ in results["differ"].values()) >= 2  # decoders


def test_what_happens_in_an_engine_happens_on_all_ranks(results):
    """Slots that are copied, cleared after an error, and given up by a request that was
    cancelled."""
    parts, whole = results["eventful"]
    assert parts == whole
    assert whole[-1] > 0  # rows that were copied
    assert any("RequestError" in told[2] or "failed" in told[2] for told in whole[:-1])


def test_each_rank_has_its_own_heads(results):
    assert results["heads"][0] * 2 == results["heads"][1]
    assert "in 2 parts" in results["shown"]
    assert results["adapted"]


def test_what_needs_the_whole_model_is_refused(results):
    assert [said.split(" needs the whole model")[0] for said in results["refused"]] == [
        "compiling", "saving", "a forward without a cache",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_leader_that_is_killed_ends_the_others(models, tmp_path):
    """kill -9 in the middle of decoding; the other one ends by itself, and says why."""
    place = tmp_path / "jobs.json"
    place.write_text(json.dumps({"dying": models["llada"][0]}))
    running = start([PROCESS, str(place)], 2, free_ports(1))
    try:
        limit = time.monotonic() + 60
        while not all(place.with_suffix(f".{rank}").is_file() for rank in (0, 1)):
            assert time.monotonic() < limit and running[0].poll() is running[1].poll() is None
            time.sleep(0.05)
        time.sleep(1)  # it decodes
        killed = time.monotonic()
        os.kill(running[0].pid, signal.SIGKILL)
        said, _ = running[1].communicate(timeout=60)
        assert time.monotonic() - killed < SECONDS_TO_END
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert running[1].returncode == 1
    assert "rank 1 lost the others" in said


@pytest.mark.slow
def test_a_server_answers_as_one_of_the_whole_model_and_dies_with_a_rank(tmp_path):
    """Rank 0 serves: streams, clients that leave, sampling. kill -9 of the other one ends it, by
    torchrun."""
    port, ranks_port = free_ports(2)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = ["-m", "decode.serve", "--tensor-parallel", "2", "--port", str(port)]
    command = [*torchrun, str(ranks_port), *command, "--model", "tiny-d2f"]
    running = [
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    ]
    asked = {"model": "tiny-d2f", "prompt": "Use 3 and 4 to make 12.", "max_tokens": 24}
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_for(client, running)
            with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as left:
                next(left.iter_lines())  # and leaves
            for more in ({}, {"temperature": 1.0, "seed": 3}):
                answer = client.post("/v1/completions", json=asked | more).json()
                decoder = decode.D2F(max_new_tokens=24, **more)
                whole = decode.generate(d2f.load("tiny-d2f"), asked["prompt"], decoder, raw=True)
                assert answer["choices"][0]["text"] == whole[0].text
            ranks = {
                child.environ()["RANK"]: child
                for child in psutil.Process(running[0].pid).children()
                if "RANK" in child.environ()
            }
            ranks["1"].kill()
            killed = time.monotonic()
            running[0].communicate(timeout=60)
        assert time.monotonic() - killed < 3 * SECONDS_TO_END
        assert running[0].returncode == 1
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_server_that_is_told_to_end_ends_all_ranks():
    port, ranks_port = free_ports(2)
    command = ["-m", "decode.serve", "--tensor-parallel", "2", "--port", str(port)]
    running = start([*command, "--model", "tiny-d2f"], 2, [ranks_port])
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        wait_for(client, running)
        client.post("/v1/completions", json={"model": "tiny-d2f", "prompt": "Use", "max_tokens": 4})
    for process in reversed(running):  # as torchrun and a terminal do
        process.send_signal(signal.SIGTERM)
    output = finish(running)
    assert output.count("serving on") == output.count("stopping") == 1  # rank 0 speaks
    assert "error:" not in output


def wait_for(client: httpx.Client, running) -> None:
    """Return when the server takes requests."""
    limit = time.monotonic() + 90
    while True:
        assert time.monotonic() < limit
        if any(process.poll() is not None for process in running):
            pytest.fail("\n".join(process.communicate()[0] for process in running))
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny-d2f", "no/such"])
def test_rank_0_speaks_for_all(tmp_path, model):
    """One output, of a run and of an error."""
    command = ["-m", "decode.pipeline", "--tensor-parallel", "2", "--model", model]
    running = start([*command, "--problems", "1", "--tasks", "countdown"], 2, free_ports(1))
    first, _ = running[0].communicate(timeout=100)
    if model == "no/such":
        running[1].terminate()  # as torchrun does when one has ended
        assert "error: no/such" in first
    second, _ = running[1].communicate(timeout=100)
    assert ("countdown" in first) is (model == "tiny-d2f")
    assert "countdown" not in second and "error:" not in second


@pytest.mark.slow
def test_a_batch_of_rows_is_answered_as_by_the_whole_model(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+4"}) + "\n" for n in range(3)))
    given = ["-m", "decode.batch", "--model", "tiny-d2f", "--max-new-tokens", "8", "--input"]
    for output, ranks in (("whole", 1), ("parts", 2)):
        more = ["--tensor-parallel", "2"] if ranks == 2 else []
        command = [*given, str(rows), "--output", str(tmp_path / output), *more]
        running = start(command, ranks, free_ports(1))
        said = [process.communicate(timeout=100)[0] for process in running]
        assert [process.returncode for process in running] == [0] * ranks, said
    whole, parts = (tmp_path / output / "answers.jsonl" for output in ("whole", "parts"))
    assert parts.read_bytes() == whole.read_bytes()


def as_one_of(monkeypatch, size: int, rank: int = 0) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("RANK", str(rank))


def test_a_size_that_does_not_divide_is_refused_before_weights_are_read(
    models, tmp_path, monkeypatch
):
    folder = Path(models["llada"][0])
    as_one_of(monkeypatch, 4)
    with pytest.raises(InputError, match="must divide num_key_value_heads, got 2"):
        d2f.load(folder, tensor_parallel=4)
    as_one_of(monkeypatch, 3)
    without = tmp_path / "without weights"
    without.mkdir()
    for name in ("config.json", "d2f_contract.json"):
        (without / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(InputError, match="must divide num_attention_heads, got 4"):
        d2f.load(without, family="llada", tensor_parallel=3)


def test_without_torchrun_it_says_how_to_start(models, monkeypatch, capsys):
    for command in (pipeline, evaluate, serve):
        more = ["--port", "0"] if command is serve else []
        status = command.main(["--model", models["llada"][0], "--tensor-parallel", "2", *more])
        assert status == 2
        assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    as_one_of(monkeypatch, 3)
    with pytest.raises(InputError, match="needs 2 processes, got 3"):
        d2f.load(models["llada"][0], tensor_parallel=2)


def test_more_ranks_than_gpus_are_refused(models, monkeypatch):
    as_one_of(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("d2f.loading.parse_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 processes on this machine need a GPU each, it has 1"):
        d2f.load(models["llada"][0], tensor_parallel=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tensor_parallel": 0}, "whole number from 1, got 0"),
        ({"tensor_parallel": 2, "quantize": True}, "not quantised"),
        ({"tensor_parallel": 2, "device": "meta", "family": "no"}, "family"),
    ],
)
def test_bad_options(models, monkeypatch, options, said):
    as_one_of(monkeypatch, 2)
    with pytest.raises((InputError, CheckpointError), match=said):
        d2f.load(models["llada"][0], **options)


@pytest.mark.parametrize("flags", [["--compile"], ["--adapter", "x", "--no-merge"]])
def test_flags_that_do_not_go_together(monkeypatch, capsys, flags):
    as_one_of(monkeypatch, 2)
    assert pipeline.main(["--tensor-parallel", "2", *flags]) == 2
    assert "is not for --tensor-parallel" in capsys.readouterr().err
