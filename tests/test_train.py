"""The training loop: it learns, resumes to the bit, distils from the same weights, exports."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny import fresh_model, random_model

import d2f
from d2f.errors import CheckpointError, InputError
from d2f.saving import save_model
from distill import checkpoint
from distill.config import TrainConfig, parse_config, read_config
from distill.data import Sample, Stream, fill_rows
from distill.export import prepare_model
from distill.objectives import OBJECTIVES
from distill.train import train
from distill.trainer import NonFiniteLossError, ranges

ROOT = Path(__file__).parent.parent
NOISE = {"masked_diffusion": {"uniform_share": 0.5}, "d2f": {"monotone_share": 0.5}}


def settings(output: Path, objective: str = "masked_diffusion", **changes) -> TrainConfig:
    values = {
        "objective": objective,
        "output": str(output),
        "family": "causal" if objective == "next_token" else "llada",
        "model": {
            "hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1,
            "context_length": 128,
        },
        "data": {"tasks": {"countdown": 1.0, "sudoku": 1.0}, "row_length": 96, "rows": 2},
        "noise": NOISE.get(objective, {}),
        "optimizer": {"lr": 0.003, "warmup": 2},
        "steps": 6,
        "save_every": 2,
        "log_every": 1,
        "tracker": "none",
    }  # fmt: skip
    values |= changes
    if "init" in changes:
        del values["model"], values["family"]
    return parse_config(values, "test")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    save_model(random_model("llada"), folder, dtype=torch.float32, objective="masked_diffusion")
    return folder


def test_a_model_from_scratch_has_a_tokenizer_that_knows_its_tasks(tmp_path):
    """Else the words of a function would be cut into letters, and too long for its response."""
    data = {"tasks": {"coding": 1.0}, "row_length": 320, "rows": 2}
    known, unknown = (
        prepare_model(config, "meta").tokenizer
        for config in (settings(tmp_path, data=data), settings(tmp_path))
    )
    program = "def rate(sizes):"
    assert len(known(program).input_ids) == 6 < len(unknown(program).input_ids)


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "model" / "model.safetensors")


@pytest.mark.parametrize("objective", ["masked_diffusion", "next_token", "d2f"])
@pytest.mark.parametrize("killed_after", [1, 3])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, teacher, objective, killed_after):
    """Optimizer, schedule, noise, dropout and data position all continue; a half-written
    checkpoint of a kill is ignored."""
    changes = {"init": str(teacher)} if objective == "d2f" else {}
    train(settings(tmp_path / "whole", objective, **changes))
    for _ in range(6):
        train(settings(tmp_path / "killed", objective, **changes), stop_after=killed_after)
        (tmp_path / "killed" / "checkpoints" / "step-0000099.writing").mkdir(exist_ok=True)
    whole, killed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    logs = [(tmp_path / n / "log.jsonl").read_text().splitlines() for n in ("whole", "killed")]
    curves = [[json.loads(line)["loss"] for line in log] for log in logs]
    assert curves[0] == curves[1]


def test_an_output_of_another_run_is_refused_and_kept(tmp_path):
    train(settings(tmp_path), stop_after=2)
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(InputError, match=r"holds another run .*steps: 6 there, 7 now"):
        train(settings(tmp_path, steps=7))
    assert (tmp_path / "config.yaml").read_bytes() == before


def test_a_run_with_more_than_is_asked_for_now_is_another(tmp_path):
    data = {"row_length": 96, "rows": 2}
    train(settings(tmp_path, data={"tasks": {"countdown": 1, "sudoku": 1}, **data}), stop_after=1)
    with pytest.raises(InputError, match=r"data.tasks.sudoku: 1.0 there, None now"):
        train(settings(tmp_path, data={"tasks": {"countdown": 1}, **data}))


def test_an_adapter_is_no_init(tmp_path, teacher):
    """Its weights would be lost under the new adapter."""
    train(settings(tmp_path / "one", "d2f", init=str(teacher), steps=1))
    adapter = tmp_path / "one" / "adapter"
    values = json.loads((adapter / "adapter_config.json").read_text())
    values["base_model_name_or_path"] = str(teacher)
    (adapter / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(InputError, match=r"adapter of teacher: expected its base as init, and it"):
        train(settings(tmp_path / "two", "d2f", init=str(adapter)))


def test_a_run_goes_on_after_a_key_came_to_the_configuration(tmp_path):
    train(settings(tmp_path), stop_after=2)
    path = tmp_path / "config.yaml"
    values = yaml.safe_load(path.read_text())
    del values["attention"]
    path.write_text(yaml.safe_dump(values))
    train(settings(tmp_path))
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_trackers_log_offline(tmp_path, tracker, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    train(settings(tmp_path / "run", tracker=tracker, steps=2))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing in the working folder
    written = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    kind = "tfevents" if tracker == "tensorboard" else ".wandb"
    assert any(kind in name for name in written)


def test_the_loss_falls(tmp_path):
    train(settings(tmp_path, "next_token", steps=40, optimizer={"lr": 0.01, "warmup": 2}))
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").open()]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_d2f_exports_adapter_merged_model_and_contract(tmp_path, teacher):
    """The adapter on its base equals the merged model; the contract says what was trained."""
    train(settings(tmp_path, "d2f", init=str(teacher), block_size=8))
    merged = d2f.load(tmp_path / "model")
    adapted = d2f.load(teacher, adapter=tmp_path / "adapter")
    assert merged.contract.objective == adapted.contract.objective == "d2f"
    assert merged.contract.block_size == 8
    assert merged.contract.noise == (0.2, 0.7)
    assert adapted.contract.base == "teacher"
    ids = torch.randint(4, 200, (2, 12))
    spans = d2f.spans.block_causal(12, 4, 8)
    with torch.no_grad():
        ours, theirs = merged.forward(ids, spans), adapted.forward(ids, spans)
        base = d2f.load(teacher).forward(ids, spans)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert not torch.equal(theirs, base)  # it has learned something
    with pytest.raises(CheckpointError, match="belongs to the base teacher"):
        other = tmp_path / "other"
        save_model(random_model("llada", 1), other, dtype=torch.float32)
        d2f.load(other, adapter=tmp_path / "adapter")


def batch_of(objective: str, model: d2f.DiffusionModel, config: TrainConfig):
    made = OBJECTIVES[objective](model, config)
    stream = Stream(config.data, model.tokenizer, model.end_ids[0], config.seed, made.tail)
    rows, _ = fill_rows(stream, 0)
    return made, rows


def test_zero_lora_and_one_block_give_exactly_zero_gradient(tmp_path):
    """Where student and teacher coincide, distillation asks for nothing: a fresh LoRA (no effect)
    and spans in which the block-causal mask is the bidirectional one."""
    from d2f.adapters import new_lora
    from d2f.spans import bidirectional

    model = fresh_model("llada")
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.0)
    objective, rows = batch_of("d2f", model, settings(tmp_path, "d2f", init="unused"))
    objective.sample_spans = lambda sample: bidirectional(len(sample))
    batch = objective.batch(rows, slice(0, 2))
    loss = objective(batch)
    loss.backward()
    gradients = [p.grad for p in objective.parameters() if p.requires_grad]
    assert loss.item() == 0.0
    assert gradients and all(g.abs().max().item() == 0.0 for g in gradients)
    del objective.sample_spans
    assert objective(objective.batch(rows, slice(0, 2))).item() > 0.0


@pytest.mark.parametrize("objective", ["masked_diffusion", "next_token", "d2f"])
def test_the_loss_does_not_depend_on_the_processes(tmp_path, objective):
    """Two halves of a step add up to the whole: noise and normaliser come from the samples."""
    model = fresh_model("causal" if objective == "next_token" else "llada")
    changes = {"init": "unused"} if objective == "d2f" else {}
    config = settings(tmp_path, objective, **changes)
    made, rows = batch_of(objective, model, config)
    made.eval()
    with torch.no_grad():
        whole = made(made.batch(rows, slice(0, 2)))
        halves = [made(made.batch(rows, slice(i, i + 1))) for i in (0, 1)]
    assert sum(halves).item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)


def test_blockwise_states_weigh_their_block_and_leave_the_left_alone(tmp_path):
    """Left of the block nothing is masked; the block counts for all of the answer's blocks; what is
    on its right is all masked and counts `far_weight`."""
    noise = {"uniform_share": 0.0, "far_weight": 0.25, "block_sizes": [4]}
    made, rows = batch_of("masked_diffusion", fresh_model("llada"), settings(tmp_path, noise=noise))
    for sample in [placed.sample for row in rows for placed in row]:
        ratios, weight = made.state(sample)
        blocks = -(-sample.answer // 4)
        partly = np.flatnonzero((ratios > 0) & (ratios < 1))
        start = int(partly[0]) // 4 * 4
        assert start < sample.answer and len(partly) <= 4
        assert (ratios[:start] == 0).all() and (ratios[start + 4 :] == 1).all()
        assert (weight[start + 4 :] == 0.25).all()
        assert weight[partly[0]] == pytest.approx(blocks / ratios[partly[0]])
        masked, drawn = made.draw(sample)
        assert not masked[:start].any() and masked[start + 4 :].all()
        tail = np.arange(len(sample.response)) >= sample.answer
        assert drawn[tail] == pytest.approx(weight[tail] * 0.1)


def test_dreams_weights_take_the_place_of_the_ratio(tmp_path):
    """Of masked tokens, which stay as they are drawn; end tokens keep their share; a causal sample
    has all tokens revealed and its own weights."""
    model = fresh_model("dream")
    plain, rows = batch_of("masked_diffusion", model, settings(tmp_path))
    noise = {"cart_p": 0.2, "causal_share": 0.3}
    made = OBJECTIVES["masked_diffusion"](model, settings(tmp_path, noise=noise))
    causal = 0
    for sample in [placed.sample for row in rows for placed in row]:
        masked, weight = made.draw(sample)
        if made.is_causal(sample):
            causal += 1
            assert weight.tolist() == made.state(sample)[1].tolist()
            continue
        assert (masked == plain.draw(sample)[0]).all()
        wanted = d2f.noise.context_weights(masked, len(sample.prompt), 0.2)
        tail = np.arange(len(sample.response)) >= sample.answer
        assert weight == pytest.approx(wanted * np.where(tail, 0.1, 1.0))
        assert (weight[masked] > 0).all()
    assert causal
    with pytest.raises(InputError, match=r"uniform_share leaves 0\.5 to block-wise decoding"):
        settings(tmp_path, noise={"cart_p": 0.2, "uniform_share": 0.5})


def test_which_samples_are_causal_follows_from_the_seed(tmp_path):
    """And from the sample's index: half of them, others with another seed."""
    model, chosen = fresh_model("dream"), []
    for seed in (0, 1):
        config = settings(tmp_path, noise={"causal_share": 0.5}, seed=seed)
        made = OBJECTIVES["masked_diffusion"](model, config)
        chosen.append([made.is_causal(Sample(i, [5], [6, 7], 2)) for i in range(200)])
    differ = sum(a != b for a, b in zip(*chosen, strict=True))
    assert all(70 < sum(causal) < 130 for causal in chosen) and 70 < differ < 130


def test_causal_samples_are_next_token_prediction(tmp_path):
    """Nothing hidden, causal spans, the answer with its first end token read; only where row p-1
    predicts position p."""
    model = fresh_model("dream")
    made, rows = batch_of(
        "masked_diffusion", model, settings(tmp_path, noise={"causal_share": 1.0})
    )
    batch = made.batch(rows, slice(0, 1))
    samples = [placed.sample for placed in rows[0]]
    assert batch.input_ids[0, : len(samples[0])].tolist() == samples[0].prompt + samples[0].response
    targets = [token for s in samples for token in s.response[: s.answer]]
    assert batch.targets.tolist() == targets
    assert torch.equal(batch.spans[0, : len(samples[0])], d2f.spans.causal(len(samples[0])))
    assert batch.weight.unique().numel() == 1
    with pytest.raises(InputError, match="causal_share needs a family"):
        train(settings(tmp_path / "llada", noise={"causal_share": 0.5}))


def test_packed_samples_do_not_see_each_other(tmp_path):
    """The gradient of one sample's loss with respect to another's tokens is exactly zero."""
    model = fresh_model("llada")
    made, rows = batch_of("masked_diffusion", model, settings(tmp_path))
    first = rows[0][0]
    batch = made.batch(rows, slice(0, 1))
    own = batch.rows < len(first.sample)
    batch = made.batch([[first], []], slice(0, 1))
    packed = made.batch(rows, slice(0, 1))
    assert own.sum() == len(batch.rows)
    with torch.no_grad():
        alone = made.read(batch, batch.spans)
        together = made.read(packed, packed.spans)[: len(batch.rows)]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    embeddings = model.backbone.model.embed_tokens.weight
    made.read(packed, packed.spans)[: len(batch.rows)].sum().backward()
    used = set(batch.input_ids[0, : len(first.sample)].tolist()) | {0}
    foreign = sorted(set(packed.input_ids[0].tolist()) - used)
    assert foreign and embeddings.grad[foreign].abs().max().item() == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "d3f"}, "objective"),
        ({"stepz": 3}, "stepz"),
        ({"steps": "many"}, "steps"),
        ({"steps": 0}, "steps"),
        ({"noise": {"low": 0.8, "high": 0.7}}, "noise.low"),
        ({"noise": {"low": 1.2}}, "noise.low"),
        ({"noise": {"min_ratio": 0.5, "max_ratio": 0.4}}, "noise.min_ratio"),
        ({"data": {"row_length": 64}}, "data.tasks and data.file"),
        ({"optimizer": {"lr": -1.0}}, "optimizer.lr"),
        ({"family": None}, "a model from scratch needs a family"),
        ({"drop_biases": True}, "drop_biases needs init"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_a_bad_configuration_is_an_error_before_any_work(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        settings(tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_no_is_a_word_and_not_a_truth_value(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("{objective: d2f, init: x, output: y, steps: 1, data: {tasks: {story: 1}},"
                    " mixed_precision: no, gradient_checkpointing: True}")  # fmt: skip
    config = read_config(path)
    assert config.mixed_precision == "no" and config.gradient_checkpointing is True
    config = read_config(path, ["--mixed_precision", "no", "--gradient_checkpointing", "false"])
    assert config.mixed_precision == "no" and config.gradient_checkpointing is False


def test_overrides_and_bad_files(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text((ROOT / "configs" / "training" / "tiny-ar.yaml").read_text())
    config = read_config(path, ["--steps", "7", "--optimizer.lr", "0.5", "--data.rows", "4"])
    assert (config.steps, config.optimizer.lr, config.data.rows) == (7, 0.5, 4)
    with pytest.raises(InputError, match="pairs"):
        read_config(path, ["--steps"])
    with pytest.raises(InputError, match="not a section"):
        read_config(path, ["--steps.more", "1"])
    with pytest.raises(InputError, match="cannot be read"):
        read_config(tmp_path / "none.yaml")
    path.write_text("[1, 2")
    with pytest.raises(InputError, match="not YAML"):
        read_config(path)


@pytest.mark.parametrize("name", ["tiny-ar", "tiny-teacher", "tiny-d2f"])
def test_the_shipped_configurations_are_valid(name):
    assert read_config(ROOT / "configs" / "training" / f"{name}.yaml").output == f"runs/{name}"


def test_own_data_from_a_file(tmp_path):
    """JSONL of prompt and response; a bad line is named."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "2+3?", "response": "5"}\n{"prompt": "1+1?", "response": "2"}\n')
    data = {"file": str(path), "row_length": 48, "rows": 2}
    train(settings(tmp_path / "out", data=data, steps=1))
    assert (tmp_path / "out" / "model" / "config.json").is_file()
    path.write_text('{"prompt": "2+3?", "response": "5"}\n{"prompt": 3}\n')
    with pytest.raises(InputError, match="line 2"):
        train(settings(tmp_path / "other", data=data, steps=1))


def test_a_sample_longer_than_a_row_is_named(tmp_path):
    data = {"tasks": {"sudoku": 1.0}, "row_length": 30, "rows": 2}
    with pytest.raises(InputError, match="sample 0 has"):
        train(settings(tmp_path, data=data, steps=1))


def spoil(monkeypatch, call: int, change) -> None:
    """Change the loss of one forward of masked_diffusion."""
    kind = OBJECTIVES["masked_diffusion"]
    plain, calls = kind.forward, iter(range(1, 100))

    def forward(self, batch):
        loss = plain(self, batch)
        return change(loss) if next(calls) == call else loss

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: loss * float("nan"),
        lambda loss: loss * float("inf"),
        lambda loss: loss + (loss * 0).sqrt(),  # a finite loss, a gradient that is not
    ],
)
def test_a_loss_that_is_not_finite_stops_and_saves_nothing(tmp_path, monkeypatch, change):
    """Found before the save at step 4 though nothing is logged; the samples of step 3 are named."""
    config = settings(tmp_path, log_every=100)
    spoil(monkeypatch, 3, change)
    with pytest.raises(NonFiniteLossError, match=r"at step 3 \(samples") as caught:
        train(config)
    assert checkpoint.steps(tmp_path / "checkpoints") == [2]
    before = checkpoint.newest(tmp_path / "checkpoints")["sample"]
    indexes = re.search(r"samples (\d+)(?:-(\d+))?\)", str(caught.value))
    assert indexes is not None and int(indexes[1]) == before
    assert not (tmp_path / "model").exists()


def test_sample_indexes_are_named_in_ranges():
    assert ranges([9, 3, 4, 5]) == "3-5, 9"
    assert ranges([7]) == "7"


def test_gradient_checkpointing_and_parts_change_nothing(tmp_path, teacher):
    """Recomputing has the same dropout; parts of a step add up to it."""
    lora = {"r": 4, "alpha": 4, "dropout": 0.1}
    for name, more in (("plain", {}), ("recomputed", {"gradient_checkpointing": True})):
        train(settings(tmp_path / name, "d2f", init=str(teacher), lora=lora, **more))
    plain, recomputed = weights(tmp_path / "plain"), weights(tmp_path / "recomputed")
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    for name, parts in (("one", 1), ("two", 2)):
        train(settings(tmp_path / name, gradient_accumulation=parts))
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=2e-5)


def test_a_bf16_base_trains_its_adapter_in_fp32_and_exports_from_the_whole_base(tmp_path, teacher):
    config = settings(tmp_path, "d2f", init=str(teacher), base_dtype="bfloat16")
    train(config)
    saved = checkpoint.newest(tmp_path / "checkpoints")
    assert {value.dtype for value in saved["weights"].values()} == {torch.float32}
    assert all("lora_" in name for name in saved["weights"])
    merged, base = weights(tmp_path), load_file(teacher / "model.safetensors")
    untouched = [name for name in base if not name.endswith(("q_proj.weight", "k_proj.weight",
                 "v_proj.weight", "o_proj.weight"))]  # fmt: skip
    assert untouched and all(torch.equal(merged[name], base[name]) for name in untouched)
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"],
        base["model.layers.0.self_attn.q_proj.weight"],
    )
