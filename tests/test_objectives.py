"""What the objectives hide, read and sum: against the formulas written out sample by sample, the
official code's values, and each other. WeDLM and WINO+ have tests of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_rows import run_settings
from safetensors.torch import load_file
from test_train import batch_of, settings
from tiny import fresh_model

import d2f
from d2f import spans
from d2f.adapters import new_lora
from d2f.config import Ratio
from d2f.errors import InputError
from distill.check import check
from distill.config import Options
from distill.data.samples import Sample
from distill.objectives import OBJECTIVES, base
from distill.objectives.base import Objective, weighted_cross_entropy
from distill.objectives.d2f import linear_reverse_kl
from distill.train import train
from triton_kernels.masked_kl import masked_linear_kl

GOLDEN = Path(__file__).parent / "golden" / "llada-tiny"


def adapted(family: str, dropout: float = 0.0) -> d2f.DiffusionModel:
    """A model with an adapter that has an effect: student and teacher differ."""
    model = fresh_model(family)
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=dropout)
    torch.manual_seed(0)
    for weight in (p for p in model.backbone.parameters() if p.requires_grad):
        torch.nn.init.normal_(weight, std=0.3)
    return model


def gradient(loss: torch.Tensor, made: Objective) -> torch.Tensor:
    parameters = [p for p in made.network.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


# The official code's values.


def test_both_losses_are_the_official_ones(llada):
    """On the golden batch's masked rows. The official code minimises CE(student, softmax(teacher))
    / p: our KL plus the teacher's entropy, which has no gradient."""
    data = load_file(GOLDEN / "forward.safetensors")
    ids, masked = data["input_ids"].long(), data["masked"].bool()
    length, prompts = ids.shape[1], data["prompt_lengths"]
    in_blocks = torch.stack([spans.block_causal(length, int(p), 8) for p in prompts])
    weight = 1 / data["p_mask"][masked] / masked.sum()
    head = llada.backbone.lm_head.weight.detach()
    with torch.no_grad():
        student = llada.hidden(ids, in_blocks)[masked]
        teacher = llada.hidden(ids, spans.bidirectional(length))[masked]
        log_p = llada.head(teacher).log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        clean = data["clean_ids"].long()[masked]
        hard = weighted_cross_entropy(llada.head(student), clean, weight)
    assert hard.item() == pytest.approx(data["loss_hard_ce_over_p"].item(), rel=1e-5)
    for columns in (None, 17):
        ours = masked_linear_kl(student, teacher, head, weight, columns=columns)
        total = ours + (entropy * weight).sum()
        assert total.item() == pytest.approx(data["loss_soft_ce_over_p"].item(), rel=1e-5)


# D2F's loss as a formula.


def written_out(made, rows, target: str, weighting: str) -> torch.Tensor:
    """Mean over the step's masked tokens of weight x sum over v of ``p log(p / q)``: (p, q) is
    (student, teacher) in the paper, (teacher, student) in the official code; weight 1 in the
    paper, 1 / p_b in the code."""
    model, total, count = made.model, torch.zeros(()), 0.0
    for sample in (placed.sample for row in rows for placed in row):
        masked, _ = made.draw(sample)
        ratios, _ = made.state(sample)
        importance = made.importance(sample)
        start = len(sample.prompt)
        ids = torch.tensor([sample.prompt + sample.response])
        places = start + torch.from_numpy(np.flatnonzero(masked))
        ids[0, places] = model.mask_id
        size = made.block_size(sample)
        student = model.forward(ids, spans.block_causal(len(sample), start, size))[0]
        with torch.no_grad(), model.adapter_disabled():
            teacher = model.forward(ids, spans.bidirectional(len(sample)))[0]
        for place in places.tolist():
            s, t = (z[place - model.logit_shift].softmax(-1) for z in (student, teacher))
            p, q = (s, t) if target == "reverse" else (t, s)
            weight = float(importance[place - start])
            count += weight
            if weighting == "inverse_ratio":
                weight /= ratios[place - start]
            total = total + weight * (p * (p.log() - q.log())).sum()
    return total / count


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("target", ["soft", "reverse"])
@pytest.mark.parametrize("weighting", ["inverse_ratio", "equal"])
def test_d2fs_loss_and_its_gradient_are_the_formula(
    tmp_path, monkeypatch, family, target, weighting
):
    """Packed, and where logits are made in parts of three rows."""
    model = adapted(family)
    monkeypatch.setattr(base, "LOGITS_BYTES", 2 * 3 * 4 * model.vocab_size)
    config = settings(
        tmp_path, "d2f", init="unused", distill_target=target, weighting=weighting, block_size=4
    )
    made, rows = batch_of("d2f", model, config)
    loss = made.forward(made.batch(rows, slice(0, len(rows))))
    expected = written_out(made, rows, target, weighting)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    ours, theirs = gradient(loss, made), gradient(expected, made)
    assert (ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()
    nothing, head = torch.zeros(0, 8), torch.zeros(30, 8)
    assert linear_reverse_kl(nothing, nothing, head, torch.zeros(0)).item() == 0.0


def test_dropout_is_the_students_alone(tmp_path):
    """Reading the teacher leaves a training student as it was."""
    model = adapted("llada", dropout=0.5)
    made, rows = batch_of("d2f", model, settings(tmp_path, "d2f", init="unused"))
    made.network.train()
    batch = made.batch(rows, slice(0, 2))
    assert torch.equal(made.read_teacher(batch), made.read_teacher(batch))
    assert made.forward(batch).item() != made.forward(batch).item()


# Packed steps.


@pytest.mark.parametrize("objective", ["masked_diffusion", "next_token", "d2f"])
def test_the_loss_does_not_depend_on_the_processes(tmp_path, objective):
    """Two halves of a step add up to the whole: noise and denominator come from the samples."""
    model = fresh_model("causal" if objective == "next_token" else "llada")
    config = settings(tmp_path, objective, **({"init": "unused"} if objective == "d2f" else {}))
    made, rows = batch_of(objective, model, config)
    made.network.eval()
    with torch.no_grad():
        whole = made.forward(made.batch(rows, slice(0, 2)))
        halves = [made.forward(made.batch(rows, slice(i, i + 1))) for i in (0, 1)]
    assert sum(halves).item() == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)


# Masked diffusion's noise.


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
        tail = masked & (np.arange(len(sample.response)) >= sample.answer)
        assert drawn[tail] == pytest.approx(weight[tail] * 0.1)
        assert not drawn[~masked].any()


def test_dreams_weights_take_the_place_of_the_ratio(tmp_path):
    """Of masked tokens, which stay as they are drawn; end tokens keep their share; of a causal
    sample nothing is hidden and the answer is read."""
    model = fresh_model("dream")
    plain, rows = batch_of("masked_diffusion", model, settings(tmp_path))
    noise = {"cart_p": 0.2, "causal_share": 0.3}
    made = OBJECTIVES["masked_diffusion"](model, settings(tmp_path, noise=noise))
    causal = 0
    for sample in [placed.sample for row in rows for placed in row]:
        masked, weight = made.draw(sample)
        tail = np.arange(len(sample.response)) >= sample.answer
        if made.is_causal(sample):
            causal += 1
            assert not masked.any() and weight.tolist() == (~tail).astype(float).tolist()
            continue
        assert (masked == plain.draw(sample)[0]).all()
        wanted = d2f.noise.context_weights(masked, len(sample.prompt), 0.2)
        assert weight == pytest.approx(wanted * np.where(tail, 0.1, 1.0))
        assert (weight[masked] > 0).all()
    assert causal


def test_causal_samples_are_next_token_prediction(tmp_path):
    """Nothing hidden, causal spans, the answer with its first end token read; only where row p-1
    predicts position p. Which they are follows from the seed and the sample's index."""
    model = fresh_model("dream")
    config = settings(tmp_path, noise={"causal_share": 1.0})
    made, rows = batch_of("masked_diffusion", model, config)
    batch = made.batch(rows, slice(0, 1))
    samples = [placed.sample for placed in rows[0]]
    assert batch.input_ids[0, : len(samples[0])].tolist() == samples[0].prompt + samples[0].response
    targets = [token for s in samples for token in s.response[: s.answer]]
    assert batch.targets.tolist() == targets
    assert torch.equal(batch.spans[0, : len(samples[0])], spans.causal(len(samples[0])))
    assert batch.weight.unique().numel() == 1
    with pytest.raises(InputError, match="causal_share needs a family"):
        train(settings(tmp_path / "llada", noise={"causal_share": 0.5}))
    chosen = []
    for seed in (0, 1):
        config = settings(tmp_path, noise={"causal_share": 0.5}, seed=seed)
        made = OBJECTIVES["masked_diffusion"](model, config)
        chosen.append([made.is_causal(Sample(i, [5], [6, 7], 2)) for i in range(200)])
    differ = sum(a != b for a, b in zip(*chosen, strict=True))
    assert all(70 < sum(causal) < 130 for causal in chosen) and 70 < differ < 130


# An objective is one file, and may be one's own.


class HalfOptions(Options):
    """Every other token is hidden."""

    prompt_rule = "bidirectional"

    weight: Ratio = 1.0
    """Of each."""

    def contract(self) -> dict[str, object]:
        return super().contract() | {"objective": "masked_diffusion"}


class Half(Objective):
    """Every other token is hidden, from a place on that the sample shifts."""

    section = HalfOptions

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        masked = (np.arange(len(sample.response)) + sample.index) % 2 == 0
        return masked, self.config.objective.weight * masked


HALF = "test_objectives:Half"
TASKS = {"tasks": {"countdown": 1.0}}


def test_an_objective_of_ones_own_trains_and_exports(tmp_path):
    config = run_settings(tmp_path, TASKS, {"name": HALF, "weight": 0.5}, log_every=1)
    assert check(config).text.startswith(f"{HALF} on llada: ")
    train(config)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["loss"] > 0 for line in lines)
    assert d2f.load(tmp_path / "model").contract.objective == "masked_diffusion"
    assert f"by the objective `{HALF}`" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("half", r"objective\.name: got 'half'; expected one of d2f, .* wino_plus, "),
        ("next_tokn", "got 'next_tokn'; did you mean next_token"),
        ({}, r"objective\.name: got None; expected one of d2f"),
        ("no_such_module:Half", "objective.name: .* cannot be imported: ModuleNotFoundError"),
        ("test_objectives:None", "objective.name: .* cannot be imported: .* no attribute 'None'"),
        ({"name": HALF, "wait": 1}, r"objective\.wait: there is no such key"),
        ({"name": HALF, "weight": 2}, r"objective\.weight: expected at most 1, got 2"),
    ],
)
def test_a_wrong_section_is_an_error_that_names_it(tmp_path, objective, message):
    with pytest.raises(InputError, match=message):
        run_settings(tmp_path, TASKS, objective)
