"""`--check`: what a run would need, from shapes alone; what would fail later fails here."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from test_train import settings
from tiny import fresh_model, random_model, tokenizer

import d2f
from d2f import quantize
from d2f.adapters import ATTENTION, new_lora
from d2f.errors import InputError
from d2f.saving import save_model
from distill import train as train_module
from distill.check import Forecast, Memory, check, layer_bytes
from distill.config import Lora, read_config
from distill.data.stream import Plan, Stream, fill_rows, plan
from distill.export import prepare_model
from distill.objectives import OBJECTIVES
from distill.objectives.d2f import D2FOptions
from distill.train import train
from distill.trainer import learning_rate

ROOT = Path(__file__).parent.parent
PUBLISHED = {
    "llada-8b-d2f": ("llada-8b", 8_015_581_184, 32 * 4 * 2 * 4096 * 32),
    "llada-1.5-d2f": ("llada-8b", 8_015_581_184, 32 * 4 * 2 * 4096 * 32),
    "dream-7b-d2f": ("dream-7b", 7_615_616_512, 28 * 32 * (2 * 2 * 3584 + 2 * (3584 + 512))),
    "dream-7b-instruct-d2f": ("dream-7b", 7_615_616_512, None),
    "diffucoder-7b-d2f": ("dream-7b", 7_615_616_512, None),
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
    if trained is not None:
        assert report.trained == trained
    assert report.rows_at_once == 1 and report.plan.places_per_step == 40 * 512
    assert report.memory.weights == 2 * parameters
    assert report.memory.optimizer == 8 * report.trained
    assert report.memory.adapter == report.memory.gradients == 4 * report.trained
    assert report.memory.activations > 5 * report.memory.activations_checkpointed
    assert not (tmp_path / "run").exists()
    text = str(report)
    assert f"{report.trained:,} trained" in text and "40 samples, 1 steps an epoch" in text


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
        made = OBJECTIVES[objective](model, config).train()
        stream = Stream(config.data, model.tokenizer, model.end_ids[0], 0, made.tail)
        batch = made.batch(fill_rows(stream, 0)[0], slice(0, 2))
        weights = {tuple(p.shape) for p in made.parameters()}
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


def test_generated_data_has_no_end_and_the_parts_add_up(tmp_path):
    report = check(settings(tmp_path, gradient_accumulation=2))
    assert report.plan.steps_per_epoch is None and "has no end" in str(report)
    memory = report.memory
    assert memory.total(False) - memory.total(True) == (
        memory.activations - memory.activations_checkpointed
    )
    # Reading and writing are before and after what is needed at once.
    elsewhere = memory.load + memory.export + memory.activations_checkpointed
    assert memory.total(False) == sum(vars(memory).values()) - elsewhere
    made = OBJECTIVES["masked_diffusion"](prepare_model(report.config), report.config)
    four = plan(made.stream(), 4)
    assert report.plan == four
    assert memory.adapter == 0 and memory.gradients == memory.weights == 4 * report.trained
    assert 0 < four.filled <= 1 and report.rows_at_once == 1
    assert memory.loss == report.reads * made.model.vocab_size * 12


def of_layers(tmp_path: Path, layers: int, **changes) -> Memory:
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": layers, "heads": 2,
             "kv_heads": 1}  # fmt: skip
    return check(settings(tmp_path, model=shape, **changes)).memory


def test_recomputed_layers_keep_their_inputs_and_one_layer_all(tmp_path):
    one, three = of_layers(tmp_path, 1), of_layers(tmp_path, 3)
    inputs = 4 * 32 * 2 * 96  # fp32, of two rows of 96 tokens
    assert three.activations == 3 * one.activations
    assert one.activations_checkpointed == one.activations + inputs
    assert three.activations_checkpointed == one.activations + 3 * inputs


def test_autocast_keeps_a_copy_of_every_linear_layer(tmp_path):
    linear = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # q and o, k and v, the MLP
    plain, cast = (of_layers(tmp_path, 2, mixed_precision=kind) for kind in ("no", "bf16"))
    assert cast.weights - plain.weights == 2 * 2 * linear
    assert plain.loss * 10 == cast.loss * 12, "a logit as it comes, in fp32, and what is made of it"


TASKS = {"tasks": {"countdown": 1.0}}
GIB = 2**30
FORECAST = {
    "family": "llada", "parameters": 2000, "trained": 500, "processes": 2, "rows_at_once": 1,
    "reads": 17, "notes": ("note: one", "note: two"),
    "plan": Plan(9, 2.46, 145.152, 100.0, 192, 40, 16.3, is_exact=False),
    "memory": Memory(
        load=8 * GIB,
        weights=GIB,
        adapter=2 * GIB,
        gradients=3 * GIB,
        optimizer=4 * GIB,
        activations=50 * GIB,
        activations_checkpointed=6 * GIB,
        loss=7 * GIB,
        export=9 * GIB,
    ),
}  # fmt: skip


def test_a_forecast_is_said_line_by_line(tmp_path):
    config = settings(tmp_path, gradient_accumulation=2, steps=20)
    assert str(Forecast(config, **FORECAST)).splitlines() == [
        "masked_diffusion on llada: 2,000 parameters, 500 trained (25.00 %)",
        "a step: 192 tokens in 2 rows of 96, 76 % filled by 2.5 samples; 2 processes x 2 parts x "
        "1 rows, 17 rows read at once",
        "data: 40 samples, 17 steps an epoch, 1.23 epochs in 20 steps",
        "memory of a process that holds the model whole, estimated, GiB:",
        "  weights (float32)                       1.000",
        "  adapter                                 2.000",
        "  gradients                               3.000",
        "  optimizer                               4.000",
        "  activations                            50.000  <- this run",
        "  activations, gradient_checkpointing     6.000",
        "  loss tile                               7.000",
        "  sum                                    67.000",
        "  to load the weights                     8.000",
        "  to write the result                     9.000",
        "FSDP2 and ZeRO-3 divide weights, adapter, gradients and optimizer by the processes, "
        "ZeRO-2 the last two.",
        "note: one",
        "note: two",
    ]


def test_rows_longer_than_the_model_was_made_for_are_noted(tmp_path):
    shape = settings(tmp_path).model.model_dump()
    for context, noted in ((96, False), (95, True)):
        model = shape | {"context_length": context}
        said = f"data.row_length 96 is more than the {context} positions"
        assert (said in str(check(settings(tmp_path, model=model)))) == noted


def other_run(tmp_path: Path) -> None:
    train(settings(tmp_path / "run"), stop_after=1)


def broken(tmp_path: Path) -> str:
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": 1}\n')
    return str(tmp_path / "broken.jsonl")


def long_line(tmp_path: Path) -> str:
    """Only the last of many lines is too long."""
    lines = ['{"prompt": "a", "response": "b"}\n'] * 50
    lines.append('{"prompt": "a", "response": "' + "9 " * 99 + '"}\n')
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
    init = str(tmp_path / "base")
    first = (
        train(settings(tmp_path / "first", "d2f", init=init, lora={"r": 3}, steps=1)) / "adapter"
    )
    changes = {"init": init, "init_adapter": str(first)}
    report = check(settings(tmp_path / "run", "d2f", **changes))
    fresh = check(settings(tmp_path / "run", "d2f", init=init, lora={"r": 3}))
    assert report.trained == fresh.trained

    values = json.loads((first / "adapter_config.json").read_text())
    (first / "adapter_config.json").write_text(json.dumps(values | {"r": 4}))
    for changed in (changes, changes | {"init_adapter": str(tmp_path / "none")}):
        for call in (check, train):
            with pytest.raises(InputError, match=r"does not fit this base|no such|expected"):
                call(settings(tmp_path / "run", "d2f", **changed))


def test_a_warm_up_that_is_not_over_is_noted(tmp_path):
    reached = settings(tmp_path, optimizer={"warmup": 6})  # in the last of its six steps
    assert learning_rate(reached, 5) == reached.optimizer.lr
    assert "warmup" not in str(check(reached))
    assert "warmup 7 is not over after 6" in str(check(settings(tmp_path, optimizer={"warmup": 7})))


def test_d2f_wants_a_bidirectional_teacher(tmp_path):
    model = fresh_model("llada")
    model.contract = d2f.Contract(**vars(model.contract) | {"family": "sdar", "rope_fp32": False})
    save_model(model, tmp_path / "sdar", dtype=torch.float32)
    config = json.loads((tmp_path / "sdar" / "config.json").read_text()) | {"model_type": "qwen3"}
    (tmp_path / "sdar" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"teacher that sees everything .*llada, dream.*got sdar"):
        check(settings(tmp_path / "run", "d2f", init=str(tmp_path / "sdar")))


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


def test_wedlm_is_counted_with_both_of_its_streams(tmp_path):
    once, twice = (
        check(settings(tmp_path / name, name, **changes)).memory.activations
        for name, changes in (
            ("masked_diffusion", {}),
            ("wedlm", {"family": "wedlm", "block_size": 8}),
        )
    )
    assert twice == 2 * once
