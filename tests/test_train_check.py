"""`--check`: what a run would need, from shapes alone; what would fail later fails here."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_train import settings
from tiny import random_model, tokenizer

from d2f import quantize
from d2f.adapters import ATTENTION, new_lora
from d2f.errors import InputError
from d2f.saving import save_model
from distill import train as train_module
from distill.check import check, layer_bytes
from distill.config import Lora, read_config
from distill.data.stream import Stream, fill_rows
from distill.export import prepare_model
from distill.objectives import OBJECTIVES
from distill.objectives.d2f import D2FOptions
from distill.train import train
from distill.trainer import learning_rate

ROOT = Path(__file__).parent.parent
PUBLISHED = {
    "llada-8b-d2f": ("llada-8b", 8_015_581_184, 32 * 4 * 2 * 4096 * 32),
    "dream-7b-d2f": ("dream-7b", 7_615_616_512, 28 * 32 * (2 * 2 * 3584 + 2 * (3584 + 512))),
}


@pytest.fixture
def pairs(tmp_path) -> Path:
    path = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{i}+3?", "response": "5" * (1 + i % 7)} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def folder(tmp_path: Path, shape: str) -> Path:
    """A checkpoint without weights: a published config.json, and a tokenizer."""
    place = tmp_path / shape
    place.mkdir()
    shutil.copy(ROOT / "tests" / "published" / shape / "config.json", place)
    made = copy.deepcopy(tokenizer())
    if shape == "llada-8b":
        made.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})  # ends its turns
    made.save_pretrained(place)
    return place


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_configurations_of_published_models_pass(tmp_path, pairs, name):
    shape, parameters, trained = PUBLISHED[name]
    changes = {"init": folder(tmp_path, shape), "data.file": pairs, "output": tmp_path / "run"}
    words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
    config = read_config(ROOT / "configs" / "training" / f"{name}.yaml", words)
    report = check(config, processes=8)
    assert report.parameters - report.trained == parameters
    assert report.trained == trained
    assert report.rows_at_once == 1 and report.plan.places_per_step == 40 * 512
    assert report.memory.weights == 2 * parameters
    assert report.memory.optimizer == 8 * report.trained
    assert report.memory.adapter == report.memory.gradients == 4 * report.trained
    assert report.memory.activations > 5 * report.memory.activations_checkpointed
    assert not (tmp_path / "run").exists()
    assert f"{report.trained:,} trained" in report.text
    assert "40 samples, 1 steps an epoch" in report.text


def test_a_4_bit_base_is_about_a_quarter(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr("distill.check.require", lambda *names: None)
    changes = ["--init", str(folder(tmp_path, "llada-8b")), "--data.file", str(pairs)]
    place = ROOT / "configs" / "training" / "llada-8b-d2f.yaml"
    config = read_config(place, [*changes, "--quantize", "4bit"])
    memory = check(config, processes=8).memory
    embeddings = 2 * 2 * 126464 * 4096  # and the head, which stay as they are
    assert memory.weights == pytest.approx(embeddings + 0.516 * 6.979e9, rel=0.01)


@pytest.mark.parametrize(
    ("objective", "targets"),
    [
        ("d2f", ATTENTION),
        ("d2f", (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
        ("d2f", ("v_proj", "down_proj")),
        ("masked_diffusion", ATTENTION),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_estimate_of_activations_is_what_autograd_keeps(
    tmp_path, objective, targets, dropout, precision
):
    """Counted on one layer: bytes of a two-layer model's saved tensors less those of a one-layer
    model's, each storage once. Left out are weights with autocast's copies of them, and what only a
    CPU keeps: attention's mask, and dropout's mask in fp32, which is counted as bytes."""
    counted = []
    for layers in (1, 2):
        shape = {
            "hidden_size": 64, "intermediate_size": 160, "layers": layers, "heads": 4,
            "kv_heads": 4, "context_length": 128,
        }  # fmt: skip
        config = settings(
            tmp_path, "masked_diffusion", model=shape, mixed_precision=precision
        )  # fmt: skip
        model = prepare_model(config)
        if objective == "d2f":
            lora = Lora(dropout=dropout, targets=targets)
            model.backbone.requires_grad_(False)
            new_lora(model, **lora.model_dump())
            section = D2FOptions(name="d2f", lora=lora)
            config = config.model_copy(update={"objective": section})
        made = OBJECTIVES[objective](model, config)
        made.network.train()
        stream = Stream(config.data, model.tokenizer, model.end_ids, 0, made.tail)
        batch = made.batch(fill_rows(stream, 0)[0], slice(0, 2))
        weights = {tuple(p.shape) for p in made.network.parameters()}
        weights |= {shape[::-1] for shape in weights}
        kept: dict[int, int] = {}
        held = []

        def pack(tensor, weights=weights, kept=kept, held=held):
            if tuple(tensor.shape) in weights or tensor.shape[-2:] == (96, 96):
                return tensor
            held.append(tensor)  # so that no address comes twice
            storage = tensor.untyped_storage()
            is_mask = tensor.numel() > 1000 and len(tensor.unique()) == 2
            kept[storage.data_ptr()] = tensor.numel() if is_mask else storage.nbytes()
            return tensor

        saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), saved:
            made.read(batch, batch.spans)
        counted.append(sum(kept.values()))
    tokens = batch.input_ids.numel()
    measured = (counted[1] - counted[0]) / tokens
    assert layer_bytes(model, config) == pytest.approx(measured, rel=0.15)


TASKS = {"tasks": {"countdown": 1.0}}


def test_rows_that_are_too_long_and_a_warm_up_that_is_not_over_are_noted(tmp_path):
    shape = settings(tmp_path).model.model_dump()
    for context, warmup, noted in ((96, 6, False), (95, 7, True)):
        model, optimizer = shape | {"context_length": context}, {"warmup": warmup}
        config = settings(tmp_path, model=model, optimizer=optimizer)
        for said in (
            f"data.row_length 96 is more than the {context} positions",
            f"warmup {warmup} is not over after 6",
        ):
            assert (said in check(config).text) == noted
        assert (learning_rate(config, 5) == config.optimizer.lr) != noted


def other_run(tmp_path: Path) -> None:
    train(settings(tmp_path / "run"), stop_after=1)


def broken(tmp_path: Path) -> str:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": 1}\n')
    return str(tmp_path / "broken.jsonl")


def long_line(tmp_path: Path) -> str:
    """Only the last of many lines is too long."""
    rows = [("a", "b")] * 50 + [("a", "9 " * 99)]
    lines = [json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows]
    (tmp_path / "long.jsonl").write_text("".join(lines))
    return str(tmp_path / "long.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda t: {"data": {"file": broken(t)}}, "line 2"),
        (lambda t: {"data": {"file": str(t / "none.jsonl")}}, "cannot be read"),
        (lambda t: {"data": {"file": long_line(t), "row_length": 48, "rows": 2}}, "line 51"),
        (
            lambda t: {"data": TASKS | {"row_length": 45, "rows": 2}, "steps": 99},
            "sample 182 has 46 tokens, data.row_length is 45",
        ),
        (lambda t: {"init": str(t / "none")}, "no such folder"),
        (lambda t: {"family": "causal"}, "needs a family with a mask"),
        (lambda t: {"objective": "next_token", "family": "llada"}, "trains the family causal"),
        (lambda t: {"gradient_accumulation": 3}, "multiple of the 1 processes x 3 parts"),
        (lambda t: other_run(t) or {"steps": 9}, "holds another run"),
    ],
)  # fmt: skip
def test_what_would_fail_later_fails(tmp_path, changes, message):
    with pytest.raises(InputError, match=message):
        check(settings(tmp_path / "run", **changes(tmp_path)))


def test_an_adapter_to_go_on_from_is_looked_at(tmp_path):
    """--check says what training would: here of another rank than its configuration, or none."""
    save_model(random_model("llada"), tmp_path / "base", dtype=torch.float32)
    init = {"init": str(tmp_path / "base")}
    first = train(settings(tmp_path / "first", "d2f", lora={"r": 3}, steps=1, **init)) / "adapter"
    values = json.loads((first / "adapter_config.json").read_text())
    (first / "adapter_config.json").write_text(json.dumps(values | {"r": 4}))
    for adapter, said in ((first, "does not fit this base"), (tmp_path / "none", "no such")):
        for call in (check, train):
            with pytest.raises(InputError, match=said):
                call(settings(tmp_path / "run", "d2f", init_adapter=str(adapter), **init))


def test_four_bits_without_bitsandbytes_say_so(tmp_path, monkeypatch):
    save_model(random_model("llada"), tmp_path / "base", dtype=torch.float32)
    monkeypatch.setattr(quantize.importlib.util, "find_spec", lambda name: None)
    config = settings(tmp_path / "run", "d2f", init=str(tmp_path / "base"), quantize="4bit")
    for call in (check, train):
        with pytest.raises(InputError, match="needs bitsandbytes, which is not installed"):
            call(config)


def test_the_command_prints_and_trains_nothing(tmp_path, capsys, monkeypatch):
    place = str(ROOT / "configs" / "training" / "tiny-ar.yaml")
    words = ["train.py", "--config", place, "--check", "--steps", "9"]
    monkeypatch.setattr("sys.argv", [*words, "--output", str(tmp_path / "run")])
    train_module.main()
    printed = capsys.readouterr().out
    assert "next_token on causal" in printed and "optimizer" in printed
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr("sys.argv", [*words, "--data.rows", "0"])
    assert train_module.main() == 2
    assert "data.rows: expected at least 1, got 0" in capsys.readouterr().err
