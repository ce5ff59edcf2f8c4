"""Packed rows of training data: no sample sees another, and what a step and an epoch hold."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
import torch
from data_rows import pairs, run_settings, stream, write
from tiny import fresh_model

from distill.data.stream import fill_rows, plan
from distill.objectives import OBJECTIVES


@pytest.mark.parametrize(
    ("objective", "family"),
    [
        ("masked_diffusion", "llada"),
        ("masked_diffusion", "dream"),
        ("d2f", "llada"),
        ("d2f", "dream"),
        ("next_token", "causal"),
    ],
)
def test_a_samples_loss_does_not_depend_on_its_row(tmp_path, objective, family):
    """Its gradient with respect to the embeddings of all others, and of unused places, is exactly
    zero; other neighbours leave it as it is (for D2F the teacher's part of it too)."""
    from d2f.adapters import new_lora

    path = str(write(tmp_path / "d.jsonl", pairs(12)))
    more = {"init": "unused"} if objective == "d2f" else {}
    config = run_settings(tmp_path, {"file": path, "row_length": 120}, objective, **more)
    model = fresh_model(family)
    if objective == "d2f":
        model.backbone.requires_grad_(False)
        new_lora(model, r=4, alpha=4, dropout=0.0)
        for name, parameter in model.adapter.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    made = OBJECTIVES[objective](model, config)
    made.network.eval()
    rows, _ = fill_rows(made.stream(), 0)
    assert len(rows[0]) >= 3
    middle = rows[0][1]
    place = slice(middle.start, middle.start + len(middle.sample))
    fed = []

    def keep(_module, _inputs, output):
        fed.append(output.requires_grad_())

    model.backbone.get_input_embeddings().register_forward_hook(keep)

    def loss_of_middle(row):
        batch = made.batch([row, rows[1]], slice(0, 1))
        own = (batch.rows >= place.start) & (batch.rows < place.stop)
        assert own.any() and not own.all()
        total = sum(
            made.normalizer(p.sample, made.draw(p.sample)[1] > 0) for r in (row, rows[1]) for p in r
        )
        return made.forward(dataclasses.replace(batch, weight=batch.weight * own)) * total

    loss = loss_of_middle(rows[0])
    found = torch.autograd.grad(loss, fed, allow_unused=True)
    (gradient,) = [g[0] for g in found if g is not None]
    inside = torch.zeros(120, dtype=torch.bool)
    inside[place] = True
    assert gradient[inside].abs().max() > 0
    assert gradient[~inside].abs().max() == 0
    others = []
    for p in rows[0]:
        other = dataclasses.replace(
            p.sample, prompt=p.sample.prompt[::-1], index=p.sample.index + 50
        )
        others.append(dataclasses.replace(p, sample=other))
    others[1] = middle
    torch.testing.assert_close(loss_of_middle(others), loss, rtol=1e-5, atol=1e-6)


def test_the_plan_of_a_file_is_what_packing_gives(tmp_path):
    path = str(write(tmp_path / "d.jsonl", [*pairs(50), {"prompt": "q", "response": "a " * 99}]))
    found = stream(file=path, on_long="drop", row_length=40)
    made = plan(found, most_steps=1000)
    steps, samples, index = [], [], 0
    while index < 51:
        rows, index = fill_rows(found, index)
        steps.append(index)
        samples.append([p.sample for row in rows for p in row])
    assert made.is_exact and made.steps == len(steps) and made.samples_per_epoch == 50
    assert made.steps_per_epoch == pytest.approx(51 / index * len(steps))
    two, held = plan(found, most_steps=2), samples[0] + samples[1]
    tokens, responses = sum(map(len, held)) / 2, sum(len(s.response) for s in held) / 2
    assert (two.samples_per_step, two.tokens_per_step) == (len(held) / 2, tokens)
    assert (two.response_tokens_per_step, two.filled) == (responses, tokens / 80)
    assert not two.is_exact and two.steps_per_epoch == 51 / steps[1] * 2
    tasks = plan(stream(tasks={"sudoku": 1.0}))
    assert tasks.samples_per_epoch is None and tasks.steps_per_epoch is None and tasks.steps == 20


ROWS = [{"prompt": f"q{i:03d}? " * (1 + i % 7), "response": f"a{i} " * (1 + i * 7 % 23)}
        for i in range(300)]  # fmt: skip
STEPS = [  # samples of 60 steps, the next step's first, and the hash of where all of them lie
    ({"on_long": "drop"}, 0, True, (147, 194, "5000bd8e7b15b533")),
    (
        {"on_long": "truncate", "max_response": 20, "row_length": 60, "rows": 3},
        5, True, (194, 195, "303818cf4c5da052"),
    ),
    (
        {"on_long": "drop", "padded_share": 0.4, "short_tail": 5},
        7, True, (129, 162, "dee17697e701d1db"),
    ),
    ({"on_long": "drop"}, 7, False, (142, 178, "2ebc870e15dd16ee")),
    ({"on_long": "truncate", "train_on_padding": True}, 1, True, (120, 121, "0f822e7b58767411")),
    (
        {"tasks": {"story": 2.0, "countdown": 1.0, "sudoku": 1.0}, "row_length": 320, "rows": 4},
        3, True, (573, 573, "500a04c3a4c874c4"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("data", "seed", "tail", "expected"), STEPS)
def test_steps_are_packed_as_they_were_in_version_0_1(tmp_path, data, seed, tail, expected):
    """So old runs go on, and old curves are made again."""
    if "tasks" not in data:
        lines = [*ROWS[:100], "", *ROWS[100:200], "{bad", "  ", *ROWS[200:]]
        path = write(tmp_path / "r.jsonl", lines)
        data = data | {"file": str(path), "on_bad_row": "skip"}
    found, index, count, digest = stream(tail=tail, seed=seed, **data), 0, 0, hashlib.sha256()
    for _ in range(60):
        rows, index = fill_rows(found, index)
        for p in (placed for row in rows for placed in row):
            ids = p.sample.prompt, p.sample.response, p.sample.answer
            digest.update(repr((p.start, p.sample.index, *ids)).encode())
            count += 1
    assert (count, index, digest.hexdigest()[:16]) == expected
