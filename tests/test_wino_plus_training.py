"""WINO+: the loss as its definition, training on rollouts, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import wino_plus_runs
from safetensors.torch import load_file
from tiny import fresh_model
from torch import Tensor
from wino_plus_runs import BLOCK_CAUSAL, settings

import d2f
from d2f import spans
from d2f.adapters import new_lora
from d2f.errors import InputError
from decode.cli import DecoderSettings
from distill.data import Placed, fill_rows
from distill.objectives import OBJECTIVES, wino_plus
from distill.objectives import base as logit_parts
from distill.train import train

base, files = wino_plus_runs.base, wino_plus_runs.files  # fixtures


# The loss.


def objective_of(
    tmp_path, files, family: str, decoder: str, **wino
) -> tuple[torch.nn.Module, list]:
    """A model whose adapter does something and whose likeliest token is often the mask, and a
    step's rows."""
    model = fresh_model(family)
    with torch.no_grad():
        model.backbone.lm_head.weight[model.mask_id] *= 2
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.0)
    torch.manual_seed(1)
    for name, parameter in model.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.03)
    config = settings(
        tmp_path, files[family, decoder], wino_plus={"tau1": 0.08, "tau2": 0.3, **wino}
    )
    made = OBJECTIVES["wino_plus"](model, config)
    rows, _ = fill_rows(made.stream(), 0)
    return made, rows


def written_out(made, rows: list[list[Placed]]) -> tuple[Tensor, np.ndarray]:
    """The loss state by state as it is defined, from all logits; and the sizes of A, R, C and
    B without R, added over the states."""
    model, chosen, total = made.model, made.settings, torch.zeros(())
    sizes, count = np.zeros(4, dtype=int), 0
    for sample in [placed.sample for row in rows for placed in row]:
        length, prompt = len(sample), len(sample.prompt)
        full = np.array(sample.prompt + sample.response)
        hidden = np.concatenate([np.zeros(prompt, dtype=bool), sample.masked])
        ids = torch.from_numpy(np.where(hidden, model.mask_id, full))[None]
        seen = spans.bidirectional(length)
        if chosen.mask == "block_causal":
            seen = spans.block_causal(length, prompt, made.settings.block_size)
        row = slice(prompt - model.logit_shift, length - model.logit_shift)
        p = model.forward(ids, seen)[0, row].softmax(-1)  # [response, V]
        allowed = p.detach().clone()
        allowed[:, model.mask_id] = -1
        y = torch.tensor(sample.response)
        c, prediction = allowed.max(-1)
        entropy = -(p * p.log()).sum(-1)
        sets = {
            "A": [i for i in range(len(y)) if sample.now[i]],
            "R": [i for i in range(len(y)) if sample.deferrable[i]
                  and prediction[i] != y[i] and c[i] >= chosen.tau1],
            "C": [i for i in range(len(y)) if sample.now[i]
                  and prediction[i] == y[i] and c[i] < chosen.tau2],
        }  # fmt: skip
        sets["B-R"] = [i for i in range(len(y)) if sample.later[i] and i not in sets["R"]]
        total = total + torch.stack([-p[i, y[i]].log() for i in sets["A"]]).mean()
        if sets["R"]:
            total = total - chosen.defer_weight * entropy[sets["R"]].mean()
        if sets["C"]:
            total = total + chosen.sharpen_weight * entropy[sets["C"]].mean()
        if chosen.kl_weight and sets["B-R"]:
            with torch.no_grad(), model.adapter_disabled():
                q = model.forward(ids, spans.bidirectional(length))[0, row].softmax(-1)
            kl = (q * (q.log() - p.log())).sum(-1)[sets["B-R"]]
            total = total + chosen.kl_weight * kl.mean()
        sizes += [len(found) for found in sets.values()]
        count += 1
    return total / count, sizes


def gradient(loss: Tensor, made) -> Tensor:
    parameters = [p for p in made.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(
    ("decoder", "wino"),
    [
        ("wino", {}),
        ("wino", {"scope": "block", "trajectory": "random"}),
        ("wino", {"kl_weight": 0.5, "scope": "block"}),
        ("d2f", BLOCK_CAUSAL),
        ("d2f", {"mask": "block_causal", "tail": False}),
    ],
)
def test_the_loss_is_its_definition(tmp_path, files, monkeypatch, family, decoder, wino):
    """Packed, on the rows that are read, in parts of seven rows, against one state after another
    from all logits; the gradient too."""
    made, rows = objective_of(tmp_path, files, family, decoder, **wino)
    monkeypatch.setattr(logit_parts, "LOGITS_BYTES", 7 * 4 * made.model.vocab_size)
    loss = made(made.batch(rows, slice(0, 8)))
    expected, sizes = written_out(made, rows)
    assert (sizes > 0).all()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = gradient(loss, made), gradient(expected, made)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_only_masked_rows_reach_the_head(tmp_path, files):
    made, rows = objective_of(tmp_path, files, "llada", "wino")
    batch = made.batch(rows, slice(0, 8))
    masked = sum(placed.sample.masked.sum() for row in rows for placed in row)
    assert len(batch.rows) == masked
    assert (batch.input_ids.flatten()[batch.rows] == made.model.mask_id).all()
    seen: list[int] = []
    head = made.model.backbone.lm_head
    hook = head.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    made(batch).backward()
    hook.remove()
    chosen = written_out(made, rows)[1]
    assert seen[0] == masked  # to choose the sets, without gradient
    assert seen[1] == seen[2] == chosen[0] + chosen[1]  # A and R, again for the gradient
    assert len(seen) == 3


@pytest.mark.parametrize("rows", [slice(0, 0), slice(0, 2)])
def test_a_process_without_samples_has_a_loss_of_zero(tmp_path, files, rows):
    made, _ = objective_of(tmp_path, files, "llada", "d2f", **BLOCK_CAUSAL)
    loss = made(made.batch([[], []], slice(0, 2)))
    assert loss.item() == 0.0
    loss.backward()


def test_the_loss_does_not_depend_on_the_processes(tmp_path, files):
    made, rows = objective_of(tmp_path, files, "dream", "d2f", **BLOCK_CAUSAL)
    with torch.no_grad():
        whole = made(made.batch(rows, slice(0, 8)))
        parts = [made(made.batch(rows, slice(i, i + 4))) for i in (0, 4)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)


@pytest.mark.parametrize("term", ["defer", "sharpen"])
def test_the_defer_term_raises_entropy_and_the_sharpen_term_lowers_it(tmp_path, files, term):
    """A small step against the term's own gradient, seen in the entropy of its set."""
    made, rows = objective_of(tmp_path, files, "llada", "wino")
    batch = made.batch(rows, slice(0, 8))

    def loss(**weights: float) -> Tensor:
        made.settings = made.settings.model_copy(
            update={"defer_weight": 0.0, "sharpen_weight": 0.0} | weights
        )
        return made(batch)

    own = gradient(loss(**{f"{term}_weight": 1.0}), made) - gradient(loss(), made)
    student = made.read(batch, batch.spans)
    confidence, token = made.predictions(student)
    right = token == batch.targets
    sets = {
        "defer": batch.deferrable & ~right & (confidence >= made.settings.tau1),
        "sharpen": batch.now & right & (confidence < made.settings.tau2),
    }

    def entropy() -> float:
        with torch.no_grad():
            p = made.model.head(made.read(batch, batch.spans)).softmax(-1)
            each = -(p * p.log()).sum(-1)
            return (each * wino_plus._mean_weight(batch, sets[term])).sum().item()

    before = entropy()
    parameters = [p for p in made.parameters() if p.requires_grad]
    vector = torch.nn.utils.parameters_to_vector(parameters)
    moved = vector - 1e-3 * own / own.norm()
    torch.nn.utils.vector_to_parameters(moved, parameters)
    change = entropy() - before
    expected = 1e-3 * own.norm().item() * (1 if term == "defer" else -1)
    assert change == pytest.approx(expected, rel=0.1)


# Training.


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "log.jsonl").open()]


@pytest.mark.parametrize(
    ("family", "decoder", "wino"),
    [("llada", "wino", {}), ("dream", "d2f", {"mask": "block_causal", "kl_weight": 0.2})],
)
def test_a_killed_run_resumes_to_the_bit_and_exports_what_decoding_must_know(
    tmp_path, files, base, family, decoder, wino
):
    changes = {"init": str(base[family]), "wino_plus": wino}
    file = files[family, decoder]
    train(settings(tmp_path / "whole", file, **changes))
    for _ in range(2):
        train(settings(tmp_path / "killed", file, **changes), stop_after=3)
    whole, killed = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed")
    )
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")

    merged = d2f.load(tmp_path / "whole" / "model")
    adapted = d2f.load(base[family], adapter=tmp_path / "whole" / "adapter")
    expected = ("d2f", "block", 4) if wino else ("wino_plus", "bidirectional", 4)
    for contract in (merged.contract, adapted.contract):
        assert (contract.objective, contract.prompt_rule, contract.block_size) == expected
    chosen = DecoderSettings(None, {}).decoder(merged, 16)  # what decodes it unless told otherwise
    assert (chosen.name, chosen.block_size) == ("d2f" if wino else "threshold", 4)
    given = DecoderSettings(None, {"block_size": 8}).decoder(merged, 16)
    assert (given.name, given.block_size) == (chosen.name, 8)
    whole = DecoderSettings("threshold", {"block_size": None}).decoder(merged, 16)
    assert whole.block_size is None  # one block for the response, as asked
    ids = torch.randint(4, 200, (1, 12))
    with torch.no_grad():
        ours, theirs = (m.forward(ids, spans.bidirectional(12)) for m in (merged, adapted))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_training_lowers_the_loss(tmp_path, files, base):
    """On the states of one rollout, which an adapter can learn by heart."""
    lines = files["llada", "wino"].read_text().splitlines(keepends=True)
    (tmp_path / "one.jsonl").write_text("".join(lines[:2]))
    lora, optimizer = {"r": 16, "alpha": 16, "dropout": 0.0}, {"lr": 0.01, "warmup": 5}
    changes = {"init": str(base["llada"]), "lora": lora, "optimizer": optimizer, "steps": 40}
    train(settings(tmp_path / "out", tmp_path / "one.jsonl", **changes))
    curve = losses(tmp_path / "out")
    assert sum(curve[-5:]) < 0.7 * sum(curve[:5])


def test_an_adapter_is_trained_on(tmp_path, files, base):
    """What was learned before is where the next training begins, the base stays the teacher."""
    changes = {"init": str(base["llada"]), "steps": 2}
    data = {"tasks": {"sudoku": 1.0}, "row_length": 128, "rows": 2}
    config = settings(tmp_path / "d2f", Path("unused"), **changes, objective="d2f", data=data)
    train(config)
    adapter = tmp_path / "d2f" / "adapter"
    wino = {"mask": "block_causal", "kl_weight": 1.0}
    config = settings(
        tmp_path / "plus", files["llada", "d2f"], **changes, init_adapter=str(adapter),
        wino_plus=wino, optimizer={"lr": 1e-9, "warmup": 0, "weight_decay": 0.0}, lora={},
    )  # fmt: skip
    train(config)
    before = load_file(adapter / "adapter_model.safetensors")
    after = load_file(tmp_path / "plus" / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-7)
    assert any(not torch.equal(after[name], value) for name, value in before.items())
    assert d2f.load(base["llada"], adapter=tmp_path / "plus" / "adapter").contract.block_size == 4


# Bad input.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wino_plus": {"tau1": 0.9, "tau2": 0.9}}, "tau1 must be below tau2, got 0.9 and 0.9"),
        ({"wino_plus": {"scope": "row"}}, "wino_plus.scope"),
        ({"wino_plus": {"sharpen_weight": -0.1}}, "wino_plus.sharpen_weight"),
        ({"wino_plus": {"lambda": 0.1}}, "wino_plus.lambda"),
        (
            {"data": {"tasks": {"story": 1.0}}},
            "needs data.file: a file of distill.rollouts",
        ),
        ({"init": None, "family": "llada", "model": {}}, "wino_plus needs init"),
        ({"objective": "masked_diffusion", "init_adapter": "x"}, "leave out init_adapter"),
    ],
)
def test_a_bad_configuration_is_an_error(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        settings(tmp_path, Path("file"), **change)


@pytest.mark.parametrize(
    ("decoder", "header", "change", "message"),
    [
        ("wino", {"mask_id": 99}, {}, "another mask_id: expected that of .*1, got 99"),
        ("wino", {"tokenizer": "f00"}, {}, "another tokenizer: .*got 'f00'"),
        ("d2f", {}, {}, "expected that of wino_plus.mask, bidirectional, got block_causal"),
        ("wino", {}, {"wino_plus": BLOCK_CAUSAL}, "expected .* block_causal, got bidirectional"),
        ("d2f", {}, {"wino_plus": BLOCK_CAUSAL, "block_size": 8}, "line 2 was decoded in blocks of "
         "4: expected those of block_size, 8"),
        ("wino", {}, {"data": {"file": "", "row_length": 40, "rows": 2}}, "line 2 has .* tokens, "
         "data.row_length is 40"),
    ],
)  # fmt: skip
def test_rollouts_that_do_not_fit_are_refused_before_training(
    tmp_path, files, base, decoder, header, change, message
):
    first, *lines = files["llada", decoder].read_text().splitlines(keepends=True)
    path = tmp_path / "rollouts.jsonl"
    run = json.loads(first)["rollouts"] | header
    path.write_text(json.dumps({"rollouts": run}) + "\n" + "".join(lines))
    if "data" in change:
        change = {"data": change["data"] | {"file": str(path)}}
    with pytest.raises(InputError, match=message):
        train(settings(tmp_path / "out", path, init=str(base["llada"]), **change))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("first", ["some notes", "{}", '{"rollouts": 5}'])
def test_a_file_that_is_none_of_rollouts_is_named(tmp_path, files, base, first):
    path = tmp_path / "rollouts.jsonl"
    lines = files["llada", "wino"].read_text().splitlines(keepends=True)[1:]
    path.write_text(first + "\n" + "".join(lines))
    with pytest.raises(InputError, match=r"rollouts\.jsonl is not a file of distill\.rollouts"):
        train(settings(tmp_path / "out", path, init=str(base["llada"])))


def test_a_rollout_with_a_foreign_or_a_mask_id_is_named(tmp_path, files, base):
    path, lines = tmp_path / "r.jsonl", files["llada", "wino"].read_text().splitlines()
    for token, message in ((5000, "line 3: ids must lie below .*got 5000"), (1, "mask id 1")):
        values = json.loads(lines[2])
        values["generated_ids"][4] = token
        path.write_text("\n".join([lines[0], lines[1], json.dumps(values), ""]))
        with pytest.raises(InputError, match=message):
            train(settings(tmp_path / "out", path, init=str(base["llada"])))
