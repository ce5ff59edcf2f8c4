"""A model in parts on two gloo processes decodes what it decodes whole; who dies takes the others
along; and what cannot be shared is refused before weights are read."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
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
    # A student has all decoders of its base, and a self-drafting adapter stays beside the weights.
    made = {
        name: (make(), name)
        for name, (make, _) in KINDS.items()
        if name not in ("llada", "dream", "self-drafting")
    }
    made["ungrouped llada"] = of_shape("llada", 4), "llada"
    made["tied"] = of_shape("dream", 2, tie_word_embeddings=True), "dream"
    for name, (model, _) in made.items():
        save_model(model, folder / name, dtype=torch.float32)
    found = {name: (str(folder / name), kind, None) for name, (_, kind) in made.items()}
    official = str(golden / "llada-tiny")
    return found | {"official": (official, "llada student", f"{official}/adapter")}


@pytest.fixture(scope="module")
def results(models, tmp_path_factory) -> dict:
    """What one pair of processes found of all of them, and how the second ended when the first,
    which then decodes without an end, was killed."""
    place = tmp_path_factory.mktemp("jobs") / "jobs.json"
    place.write_text(json.dumps({"models": models, "show": "official"}))
    running = start([PROCESS, str(place)], 2, free_ports(1))
    try:
        limit = time.monotonic() + 200
        while not place.with_suffix(".result").is_file():
            assert time.monotonic() < limit and running[0].poll() is running[1].poll() is None, [
                process.kill() or process.communicate()[0] for process in running
            ]
            time.sleep(0.05)
        time.sleep(0.5)  # it decodes
        killed = time.monotonic()
        os.kill(running[0].pid, signal.SIGKILL)
        said, _ = running[1].communicate(timeout=60)
        ended = running[1].returncode, said, time.monotonic() - killed
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return json.loads(place.with_suffix(".result").read_text()) | {"ended": ended}


@pytest.mark.slow
def test_it_decodes_what_the_whole_model_decodes(results, models):
    """The same tokens in the same forwards: every family and decoder, grouped heads and not, tied
    embeddings, a merged adapter."""
    assert set(results["differ"]) == set(models)
    assert {name: differ for name, (_, differ) in results["differ"].items() if differ} == {}
    assert min(count for count, _ in results["differ"].values()) >= 2  # decoders


def test_what_happens_in_an_engine_happens_on_all_ranks(results):
    """Slots that are copied, cleared after an error, and given up by a request that was
    cancelled; each rank with its own heads; and what needs the whole model is refused."""
    parts, whole = results["eventful"]
    assert parts == whole
    assert whole[-1] > 0  # rows that were copied
    assert any("RequestError" in told[2] or "failed" in told[2] for told in whole[:-1])
    assert results["heads"][0] * 2 == results["heads"][1]
    assert "in 2 parts" in results["shown"]
    assert results["adapted"]
    assert [said.split(" needs the whole model")[0] for said in results["refused"]] == [
        "compiling", "saving", "a forward without a cache",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_leader_that_is_killed_ends_the_others(results):
    """kill -9 in the middle of decoding; the other one ends by itself, and says why."""
    status, said, seconds = results["ended"]
    assert status == 1 and "rank 1 lost the others" in said
    assert seconds < SECONDS_TO_END


@pytest.mark.slow
def test_a_server_answers_as_one_of_the_whole_model_and_ends_with_its_ranks():
    """Rank 0 serves: streams, clients that leave, sampling; a terminal's SIGTERM ends both."""
    port, ranks_port = free_ports(2)
    command = ["-m", "decode.serve", "--tensor-parallel", "2", "--port", str(port)]
    running = start([*command, "--model", "tiny-d2f"], 2, [ranks_port])
    asked = {"model": "tiny-d2f", "prompt": "Use 3 and 4 to make 12.", "max_tokens": 24}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        wait_for(client, running)
        with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as left:
            next(left.iter_lines())  # and leaves
        for more in ({}, {"temperature": 1.0, "seed": 3}):
            answer = client.post("/v1/completions", json=asked | more).json()
            decoder = decode.D2F(max_new_tokens=24, **more)
            whole = decode.generate(d2f.load("tiny-d2f"), asked["prompt"], decoder, raw=True)
            assert answer["choices"][0]["text"] == whole[0].text
    for process in reversed(running):
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


def as_one_of(monkeypatch, size: int, rank: int = 0) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("RANK", str(rank))


def test_a_size_that_does_not_divide_is_refused_before_weights_are_read(
    models, tmp_path, monkeypatch
):
    folder = Path(models["causal"][0])
    for name in ("config.json", "d2f_contract.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for size, said in ((4, "num_key_value_heads, got 2"), (3, "num_attention_heads, got 4")):
        as_one_of(monkeypatch, size)
        with pytest.raises(InputError, match=f"must divide {said}"):
            d2f.load(tmp_path, tensor_parallel=size)


def test_without_torchrun_it_says_how_to_start(models, monkeypatch, capsys):
    for command in (pipeline, evaluate, serve):
        more = ["--port", "0"] if command is serve else []
        status = command.main(["--model", models["causal"][0], "--tensor-parallel", "2", *more])
        assert status == 2
        assert "torchrun --nproc-per-node 2" in capsys.readouterr().err
    as_one_of(monkeypatch, 2)
    for flags in (["--compile"], ["--adapter", "tiny-wino-plus", "--no-merge"]):
        assert pipeline.main(["--tensor-parallel", "2", *flags]) == 2
        assert "with --tensor-parallel is not possible" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        (2, {"tensor_parallel": 0}, "whole number from 1, got 0"),
        (3, {"tensor_parallel": 2}, "needs 2 processes, got 3"),
        (2, {"tensor_parallel": 2, "quantize": True}, "not quantised"),
        (2, {"tensor_parallel": 2, "device": "meta", "family": "no"}, "family"),
    ],
)
def test_bad_options(models, monkeypatch, size, options, said):
    as_one_of(monkeypatch, size)
    with pytest.raises((InputError, CheckpointError), match=said):
        d2f.load(models["causal"][0], **options)


def test_more_ranks_than_gpus_are_refused(models, monkeypatch):
    as_one_of(monkeypatch, 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("d2f.loading.parse_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 processes on this machine need a GPU each, it has 1"):
        d2f.load(models["causal"][0], tensor_parallel=2)
