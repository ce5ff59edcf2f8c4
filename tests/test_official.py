"""The family's own format: what the published checkpoints look like, read back to the last bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import fresh_model, random_model

from d2f.errors import CheckpointError
from d2f.families import get_family
from d2f.loading import load
from d2f.saving import save_model, save_official
from d2f.spans import bidirectional
from distill.config import parse_config
from distill.export import curve
from distill.train import train

IDS = torch.tensor([[5, 9, 4, 31, 7, 2, 2, 18, 30, 6, 11]])


def logits(model):
    with torch.inference_mode():
        return model.forward(IDS, bidirectional(IDS.shape[1]))


def raw(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_an_official_checkpoint_is_written_as_it_was(golden, family, tmp_path, request):
    """Every weight under its own name, every field of the configuration."""
    model = request.getfixturevalue(family)
    save_official(model, tmp_path / "out", dtype=torch.float32)
    source = golden / f"{family}-tiny"
    theirs = load_file(source / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert raw(tmp_path / "out") == raw(source)
    (tmp_path / "out" / "d2f_contract.json").unlink()  # as an official checkpoint has none
    assert torch.equal(logits(load(tmp_path / "out", device="cpu")), logits(model))


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_this_project_is_written_in_the_official_format(golden, family, dtype, tmp_path):
    """From transformers' format: the fields that the published configuration has, and the logits
    of the same weights to the bit."""
    model = random_model(family)
    save_model(model, tmp_path / "native", dtype=dtype, objective="d2f", block_size=4)
    native = load(tmp_path / "native", device="cpu")
    save_official(native, tmp_path / "out", dtype=dtype)
    again = load(tmp_path / "out", device="cpu")
    assert torch.equal(logits(again), logits(native))
    assert again.contract == native.contract
    published = raw(golden / f"{family}-tiny")
    made = raw(tmp_path / "out")
    unsaid = {k for k, v in published.items() if v is None} | {"transformers_version"}
    assert published.keys() - unsaid <= made.keys() | {
        "alibi_bias_max", "attention_layer_norm_with_affine", "mlp_ratio",
    }  # fmt: skip
    # What the published fields say, but for the sizes of this model and how it is loaded.
    sizes = {k for k, v in published.items() if type(v) is int and k != "block_group_size"}
    loaded = {"rope_theta", "rms_norm_eps", "torch_dtype", "mask_token_id"}
    same = published.keys() & made.keys() - sizes - loaded
    assert {k: made[k] for k in same} == {k: published[k] for k in same}
    assert made["mask_token_id"] == model.mask_id
    (tmp_path / "out" / "d2f_contract.json").unlink()
    assert load(tmp_path / "out", device="cpu").family == family


def test_the_bases_own_code_comes_along(golden, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    for path in (golden / "llada-tiny").iterdir():
        if path.is_file():
            (base / path.name).write_bytes(path.read_bytes())
    values = raw(base) | {"auto_map": {"AutoConfig": "configuration_llada.LLaDAConfig"}}
    (base / "config.json").write_text(json.dumps(values))
    model = load(base, device="cpu")
    save_official(model, tmp_path / "without", dtype=torch.float32)
    assert "auto_map" not in raw(tmp_path / "without"), "it would name files that are not there"
    (base / "configuration_llada.py").write_text("# the family's\n")
    save_official(model, tmp_path / "with", dtype=torch.float32)
    assert raw(tmp_path / "with")["auto_map"] == values["auto_map"]
    assert (tmp_path / "with" / "configuration_llada.py").read_text() == "# the family's\n"


def test_what_the_format_cannot_say_is_refused(tmp_path):
    model = fresh_model("llada")
    with pytest.raises(CheckpointError, match="has no name for this weight"):
        get_family("llada").official_name("model.layers.0.self_attn.q_norm.weight")
    model.backbone.config.rope_parameters = {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=r"cannot say .* rope_parameters"):
        save_official(model, tmp_path / "a", dtype=torch.float32)
    with pytest.raises(CheckpointError, match="known for dream and llada, got the family wedlm"):
        save_official(random_model("wedlm"), tmp_path / "b", dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_an_adapter_is_merged_as_it_is_written(golden, tmp_path):
    folder = golden / "llada-tiny"
    model = load(folder, adapter=folder / "adapter", device="cpu")
    save_official(model, tmp_path / "a", dtype=torch.float16)
    model.merge_adapter()
    save_official(model, tmp_path / "b", dtype=torch.float16)
    assert listing(tmp_path / "a") == listing(tmp_path / "b")


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_dreams_format_says_how_positions_are_scaled(tmp_path):
    model = fresh_model("dream")
    scaling = {"rope_type": "linear", "factor": 2.0}
    model.backbone.config.rope_parameters = scaling | {"rope_theta": 10000.0}
    save_official(model, tmp_path, dtype=torch.float32)
    assert (raw(tmp_path)["rope_scaling"], raw(tmp_path)["rope_theta"]) == (scaling, 10000.0)


def settings(output: Path, **changes):
    values = {
        "objective": "d2f",
        "output": str(output),
        "block_size": 8,
        "data": {"tasks": {"countdown": 1.0}, "row_length": 80, "rows": 2},
        "optimizer": {"lr": 0.01, "warmup": 0},
        "steps": 3,
        "log_every": 1,
        "tracker": "none",
        "export_official": True,
    }
    return parse_config(values | changes, "test")


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_run_exports_the_merged_model_officially_and_a_card(tmp_path, family):
    base, run = tmp_path / "base", tmp_path / "run"
    save_model(random_model(family), base, dtype=torch.float32)
    train(settings(run, init=str(base)))
    merged, official = load(run / "model", device="cpu"), load(run / "official", device="cpu")
    assert raw(run / "official")["model_type"] in ("llada", "Dream")
    assert torch.equal(logits(official), logits(merged))
    assert official.contract == merged.contract
    assert not torch.equal(logits(official), logits(load(base, device="cpu")))
    lines = [json.loads(line) for line in (run / "log.jsonl").open()]
    cards = {(run / name / "README.md").read_text() for name in ("model", "adapter", "official")}
    assert len(cards) == 1
    card = cards.pop()
    points = [f"| {line['step']} | {line['loss']:.4f} |" for line in lines]
    assert "\n".join(["| step | loss |", "|---|---|", *points]) in card
    assert "`d2f train --config config.yaml`" in card
    assert (run / "config.yaml").read_text().strip() in card


def test_the_card_tells_other_data_apart(tmp_path):
    """The samples' hash changes with what is trained on, and a file's own hash is there."""
    base, data = tmp_path / "base", tmp_path / "data.jsonl"
    save_model(random_model("llada"), base, dtype=torch.float32)
    hashes = set()
    for i, answer in enumerate("5556"):
        pairs = [{"prompt": "2+3?", "response": answer}, {"prompt": "4-1?", "response": "3"}]
        data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        values = {"file": str(data), "row_length": 48, "rows": 2}
        seed = 1 if i == 1 else 0
        train(settings(tmp_path / f"run{i}", init=str(base), data=values, steps=1, seed=seed))
        card = (tmp_path / f"run{i}" / "model" / "README.md").read_text()
        line = next(line for line in card.splitlines() if "first 256 samples" in line)
        hashes.add(line)
        assert hashlib.sha256(data.read_bytes()).hexdigest() in card
    assert len(hashes) == 3, "another seed, another answer, and twice the same"


def test_an_official_export_of_another_family_is_refused_before_training(tmp_path):
    base = tmp_path / "base"
    save_model(random_model("causal"), base, dtype=torch.float32)
    changes = {"objective": "next_token", "init": str(base), "block_size": 16}
    with pytest.raises(CheckpointError, match="known for dream and llada, got the family causal"):
        train(settings(tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_a_curve_has_every_logged_step_and_evaluation():
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 101)]
    lines[41] |= {"evaluation/accuracy": 0.5, "evaluation/tokens_per_forward": 2.25}
    table = curve(lines)
    assert table[:2] == ["| step | loss | accuracy | tokens per forward |", "|---|---|---|---|"]
    assert table[2] == "| 1 | 1.0000 |  |  |" and table[-1] == "| 100 | 0.0100 |  |  |"
    assert "| 42 | 0.0238 | 0.500 | 2.250 |" in table and len(table) == 2 + 100
