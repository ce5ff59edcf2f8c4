"""The held-out loss: its value from the formulas, on dense masks; its errors; its masks."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wino_plus_runs
from data_rows import run_settings
from test_wino_plus import objective_of
from tiny import fresh_model
from torch import Tensor

from d2f import noise
from d2f.adapters import new_lora
from d2f.errors import InputError
from d2f.model import DiffusionModel
from distill.data.samples import HeldOut, Sample
from distill.evaluation import HeldoutLoss, summary, undisturbed
from distill.objectives import OBJECTIVES
from distill.objectives.base import Objective
from tests.references.predictions import dense_logits

base, files = wino_plus_runs.base, wino_plus_runs.files  # fixtures
RATIOS = (0.2, 0.7)


def made_up(index: int, prompt: int, response: int, answer: int) -> Sample:
    """Random ids; behind the answer the tail."""
    ids = np.random.default_rng([index, prompt]).integers(4, 200, prompt + response).tolist()
    return Sample(index, ids[:prompt], ids[prompt:], answer)


SAMPLES = [made_up(3, 7, 20, 20), made_up(4, 12, 9, 5), made_up(9, 1, 13, 12)]


def objective(name: str, family: str, **changes: Any) -> Objective:
    """A tiny model's; an adapter does something, so that student and teacher differ."""
    changes["evaluation"] = {"loss_rows": 3, "batch_size": 2} | changes.get("evaluation", {})
    config = run_settings(Path("unused"), {"tasks": {"countdown": 1.0}}, name, **changes)
    if not config.trains_adapter:
        return OBJECTIVES[name](fresh_model(family), config)
    return OBJECTIVES[name](with_adapter(family), config)


def with_adapter(family: str) -> DiffusionModel:
    model = fresh_model(family)
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=4, dropout=0.5)
    torch.manual_seed(1)
    for name, parameter in model.adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def measured(made: Objective, samples: list[Sample]) -> dict[str, float]:
    loss = HeldoutLoss(made, HeldOut(samples, "made up"))
    made.network.train()
    with undisturbed(made.model):
        return loss.measure()


def masks(sample: Sample, ratio: float) -> tuple[Tensor, Tensor]:
    """Of the response: what is hidden, and what of it is counted."""
    drawn = np.random.default_rng([0, noise.MASK, sample.index]).random(len(sample.response))
    hidden = torch.from_numpy(drawn < ratio)
    return hidden, hidden & (torch.arange(len(hidden)) < sample.answer)


def predictions(
    model: DiffusionModel, sample: Sample, hidden: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probabilities of the response's places, its clean ids), the hidden ones masked."""
    clean = torch.tensor(sample.prompt + sample.response)
    ids, prompt = clean.clone(), len(sample.prompt)
    ids[prompt:][hidden] = model.mask_id if model.mask_id is not None else -1
    logits = dense_logits(model, ids.tolist(), allowed)
    rows = torch.arange(prompt, len(ids)) - model.logit_shift
    return logits[rows].log_softmax(-1), clean[prompt:]


def in_blocks(sample: Sample, size: int) -> Tensor:
    """What a block-causal student sees: the prompt is block 0."""
    place = torch.arange(len(sample)) - len(sample.prompt)
    block = torch.where(place < 0, 0, place // size + 1)
    return block[:, None] >= block


def everything(sample: Sample) -> Tensor:
    return torch.ones(len(sample), len(sample), dtype=torch.bool)


@pytest.mark.parametrize("target", ["soft", "hard"])
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_of_d2f_it_is_kl_and_cross_entropy_in_blocks_by_ratio(family, target):
    made = objective(
        "d2f", family, init="unused", block_size=4, distill_target=target,
        evaluation={"loss_ratios": RATIOS},
    )  # fmt: skip
    found, model = measured(made, SAMPLES), made.model
    model.adapter.eval()
    for ratio in RATIOS:
        entropy, kl, tokens = 0.0, 0.0, 0
        for sample in SAMPLES:
            hidden, counted = masks(sample, ratio)
            student, clean = predictions(model, sample, hidden, in_blocks(sample, 4))
            with model.adapter_disabled():
                teacher, _ = predictions(model, sample, hidden, everything(sample))
            entropy -= student[counted, clean[counted]].sum().item()
            kl += (teacher.exp() * (teacher - student)).sum(-1)[counted].sum().item()
            tokens += int(counted.sum())
        assert found[f"evaluation/cross_entropy/{ratio}"] == pytest.approx(entropy / tokens, 1e-4)
        assert found[f"evaluation/kl/{ratio}"] == pytest.approx(kl / tokens, 1e-4)
        assert kl / tokens > 0.01
    for name in ("cross_entropy", "kl"):
        each = [found[f"evaluation/{name}/{ratio}"] for ratio in RATIOS]
        assert found[f"evaluation/{name}"] == pytest.approx(sum(each) / 2)
        assert found[f"evaluation/{name}_stderr"] > 0


@pytest.mark.parametrize(
    ("family", "settings"), [("llada", {"uniform_share": 0.0}), ("dream", {"causal_share": 1.0})]
)
def test_of_masked_diffusion_it_is_the_same_whatever_the_noise(family, settings):
    made = objective("masked_diffusion", family, noise=settings, evaluation={"loss_ratios": RATIOS})
    found = measured(made, SAMPLES)
    assert not [name for name in found if "kl" in name]
    for ratio in RATIOS:
        losses = []
        for sample in SAMPLES:
            hidden, counted = masks(sample, ratio)
            log_p, clean = predictions(made.model, sample, hidden, everything(sample))
            losses += (-log_p[counted, clean[counted]]).tolist()
        assert found[f"evaluation/cross_entropy/{ratio}"] == pytest.approx(np.mean(losses), 1e-4)


def test_of_wedlm_it_is_cross_entropy_behind_the_clean_blocks():
    """Each mask sees the clean blocks before its own, what is observed in its block, and the masks
    before it there."""
    made = objective("wedlm", "wedlm", block_size=4, evaluation={"loss_ratios": [0.5]})
    losses = []
    for sample in SAMPLES:
        response, counted = masks(sample, 0.5)
        length, prompt = len(sample), len(sample.prompt)
        clean = torch.tensor(sample.prompt + sample.response)
        hidden = torch.cat((torch.zeros(prompt, dtype=torch.bool), response))
        at = torch.arange(length)
        block = at // 4
        # x_t in the order of the text: an observed token sees the observed ones up to itself.
        sees = torch.where(
            hidden[:, None], ~hidden | (at <= at[:, None]), ~hidden & (at <= at[:, None])
        )
        allowed = torch.zeros(2 * length, 2 * length, dtype=torch.bool)
        allowed[:length, :length] = at <= at[:, None]
        allowed[length:, :length] = block < block[:, None]
        allowed[length:, length:] = (block == block[:, None]) & sees
        noisy = torch.where(hidden, torch.tensor(made.model.mask_id), clean)
        ids, positions = torch.cat((clean, noisy)).tolist(), [*range(length), *range(length)]
        log_p = dense_logits(made.model, ids, allowed, positions).log_softmax(-1)[length + prompt :]
        losses += (-log_p[counted, clean[prompt:][counted]]).tolist()
    found = measured(made, SAMPLES)
    assert found["evaluation/cross_entropy"] == pytest.approx(np.mean(losses), 1e-4)


def test_of_next_token_it_is_cross_entropy_and_has_no_ratios():
    made = objective("next_token", "causal")
    losses = []
    for sample in SAMPLES:
        nothing = torch.zeros(len(sample.response), dtype=torch.bool)
        causal = torch.ones(len(sample), len(sample), dtype=torch.bool).tril()
        log_p, clean = predictions(made.model, sample, nothing, causal)
        every = -log_p.gather(1, clean[:, None])[: sample.answer, 0]
        losses += every.tolist()
    found = measured(made, SAMPLES)
    assert set(found) == {"evaluation/cross_entropy", "evaluation/cross_entropy_stderr"}
    assert found["evaluation/cross_entropy"] == pytest.approx(np.mean(losses), 1e-4)


@pytest.mark.parametrize("kl_weight", [0.0, 1.0])
def test_of_wino_plus_it_is_cross_entropy_of_what_the_decoder_decided_next(
    tmp_path, files, kl_weight
):
    made, _ = objective_of(tmp_path, files, "llada", "wino", kl_weight=kl_weight)
    made.config = made.config.model_copy(
        update={"evaluation": made.config.evaluation.model_copy(update={"loss_rows": 1})}
    )
    end = made.model.end_ids[0]  # in the middle, so that there is a tail
    made.rollouts = [
        r.model_copy(update={"generated_ids": (*r.generated_ids[:5], end, *r.generated_ids[6:])})
        for r in made.rollouts
    ]
    stream = made.stream()
    held = stream.held_out
    assert held is not None and held.samples
    # Whole rollouts: no state of a held-out one is trained on.
    trained = {tuple(stream.sample(i).prompt) for i in range(2 * stream.epoch)}
    assert not trained & {tuple(state.prompt) for state in held.samples}
    assert len(trained) == 2
    losses = []
    for state in held.samples:
        log_p, clean = predictions(
            made.model, state, torch.from_numpy(state.masked), everything(state)
        )
        now = torch.from_numpy(state.now)
        losses += (-log_p[now, clean[now]]).tolist()
        assert not state.now[state.answer :].any(), "the tail is not counted"
    found = measured(made, held.samples)
    assert found["evaluation/cross_entropy"] == pytest.approx(np.mean(losses), 1e-4)


def test_the_error_is_that_of_the_estimate():
    """A plain mean's of as many tokens in each sample."""
    sums = np.random.default_rng(0).normal(5.0, 1.0, (6, 2))
    values = summary("a", sums, np.full((6, 2), 4.0), (0.25, 0.5))
    each, both = sums / 4, (sums / 4).mean(1)
    assert values["a/0.5"] == pytest.approx(each[:, 1].mean())
    assert values["a_stderr/0.5"] == pytest.approx(each[:, 1].std(ddof=1) / sqrt(6))
    assert values["a"] == pytest.approx(both.mean())
    assert values["a_stderr"] == pytest.approx(both.std(ddof=1) / sqrt(6))
    one = summary("a", sums[:1], np.full((1, 2), 4.0), (0.25, 0.5))
    assert one.keys() == {"a", "a/0.25", "a/0.5"}


def test_a_ratio_that_hides_nothing_is_refused():
    made = objective("masked_diffusion", "llada", evaluation={"loss_ratios": [0.5, 1e-9]})
    with pytest.raises(InputError, match=r"loss_ratios: 1e-09 masks no token .* \(made up\)"):
        HeldoutLoss(made, HeldOut(SAMPLES, "made up"))


def test_it_does_not_depend_on_how_many_samples_are_fed_at_once():
    found = [
        measured(objective("masked_diffusion", "llada", evaluation={"batch_size": size}), SAMPLES)
        for size in (1, 3)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
