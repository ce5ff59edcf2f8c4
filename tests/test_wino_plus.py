"""WINO+: the states of a trajectory, the loss as its definition, training on rollouts, and what is
refused."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import wino_plus_runs
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_train import same
from tiny import fresh_model, random_model
from torch import Tensor
from wino_plus_runs import BLOCK_CAUSAL, settings

import d2f
from d2f import spans
from d2f.adapters import new_lora
from d2f.errors import InputError
from decode.cli import DecoderSettings
from distill.data.__main__ import main as inspect
from distill.data.samples import Placed
from distill.data.stream import fill_rows, plan
from distill.objectives import OBJECTIVES
from distill.objectives import base as shared
from distill.objectives.base import Objective
from distill.objectives.wino_plus import (
    Rollout,
    StateStream,
    WinoPlusOptions,
    answer_length,
    random_steps,
    state_at,
)
from distill.train import train

base, files = wino_plus_runs.base, wino_plus_runs.files  # fixtures


# The states of a trajectory.

steps_and_appends = st.integers(1, 4).flatmap(
    lambda blocks: st.tuples(
        st.lists(st.integers(0, 3), min_size=blocks, max_size=blocks).map(
            lambda gaps: np.cumsum([0, *gaps[1:]]).tolist()
        ),
        st.lists(st.integers(0, 6), min_size=3 * blocks - 2, max_size=3 * blocks),
    )
)


def rollout_of(appends: list[int], offsets: list[int], tokens: list[int] | None = None) -> Rollout:
    steps = [appends[i // 3] + offset for i, offset in enumerate(offsets)]
    values = {
        "unique_id": "x", "source": "story", "prompt_ids": [5, 6], "text": "",
        "generated_ids": tokens or [7 + i for i in range(len(steps))],
        "trajectory_accepted": steps, "trajectory_proposed": [0] * len(steps),
        "append_steps": appends, "block_size": 3, "decoding_steps": max(steps) + 1,
        "used_temperature": 0.0,
    }  # fmt: skip
    return Rollout.model_validate_json(json.dumps(values))


@given(steps_and_appends, st.sampled_from(["all", "block"]), st.sampled_from([0.0, 1.0]))
def test_each_state_splits_what_is_there_into_revealed_now_and_later(drawn, scope, kl):
    rollout = rollout_of(*drawn)
    steps = np.array(rollout.trajectory_accepted)
    there_from = np.repeat(rollout.append_steps, 3)[: len(steps)]
    decided = np.zeros(len(steps), dtype=int)
    chosen = WinoPlusOptions(name="wino_plus", scope=scope, kl_weight=kl)
    for t in np.unique(steps):
        state = state_at(rollout, steps, int(t), chosen, (0,), 0)
        there = there_from <= t
        length = len(steps) if kl else there.sum()
        assert len(state.response) == len(state.masked) == length
        revealed = ~state.masked
        assert state.now.any()
        assert (revealed[: there.sum()].astype(int) + state.now[: there.sum()]
                + state.later[: there.sum()] == 1).all()  # fmt: skip
        assert not (state.now | state.later | revealed)[there.sum() :].any()
        assert (steps[:length][revealed] < t).all() and (steps[:length][state.later] > t).all()
        block = np.arange(length) // 3
        near = block == block[state.now][0]
        assert (state.deferrable == (state.later & (near | (scope == "all")))).all()
        decided[:length] += state.now
    assert (decided == 1).all()


def test_the_tail_may_be_left_out():
    rollout = rollout_of([0, 0], [0, 1, 0, 2, 1, 3], [7, 8, 9, 0, 0, 0])
    steps = np.array(rollout.trajectory_accepted)
    assert answer_length(rollout, (0,)) == 4
    state = state_at(rollout, steps, 1, WinoPlusOptions(name="wino_plus", tail=False), (0,), 0)
    assert np.flatnonzero(state.now).tolist() == [1]
    assert np.flatnonzero(state.later).tolist() == [3]
    assert np.flatnonzero(state.masked).tolist() == [1, 3, 4, 5]  # the tail stays hidden
    data = settings(Path("out"), Path("file")).data
    for tail, count in ((True, 4), (False, 3)):
        stream = StateStream(data, [rollout], WinoPlusOptions(name="wino_plus", tail=tail), (0,), 0)
        assert len(stream.states) == count
        assert all(stream.sample(i).now.any() for i in range(count))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 8), st.integers(0, 99))
def test_random_trajectories_keep_each_blocks_steps(steps, size, seed):
    """Every step of a block is used at least once and no other, so its states stay as many."""
    mixed = random_steps(np.array(steps), size, np.random.default_rng(seed))
    assert len(mixed) == len(steps)
    for start in range(0, len(steps), size):
        assert set(mixed[start : start + size]) == set(steps[start : start + size])


def test_an_epoch_has_every_state_once_in_an_order_of_its_own(tmp_path, files):
    config = settings(tmp_path, files["llada", "wino"])
    stream = OBJECTIVES["wino_plus"](random_model("llada"), config).stream()
    count = len(stream.states)
    assert count == sum(len(set(r.trajectory_accepted)) for r in stream.rollouts) > 20
    assert plan(stream, most_steps=1).samples_per_epoch == count
    epochs = [[stream.sample(e * count + i) for i in range(count)] for e in range(2)]
    seen = [[(tuple(s.prompt), s.masked.sum(), s.now.tobytes()) for s in epoch] for epoch in epochs]
    assert sorted(seen[0]) == sorted(seen[1]) and seen[0] != seen[1]
    again = stream.sample(3)
    assert (again.masked == epochs[0][3].masked).all() and again.prompt == epochs[0][3].prompt
    decided = [list(rollout.trajectory_accepted) for rollout in stream.rollouts]
    assert [steps.tolist() for steps in stream.steps] == decided
    mixed = settings(tmp_path, files["llada", "wino"], trajectory="random")
    other = OBJECTIVES["wino_plus"](random_model("llada"), mixed).stream()
    assert len(other.states) == count
    assert any((a != b).any() for a, b in zip(stream.steps, other.steps, strict=True))


def test_inspect_shows_what_is_decided_next(tmp_path, files, base):
    """The states that training sees, as the stream gives them."""
    config = settings(tmp_path / "out", files["llada", "wino"], init=str(base["llada"]))
    config.save(tmp_path / "c.yaml")
    out = io.StringIO()
    given = ["--inspect", "--config", str(tmp_path / "c.yaml"), "--samples", "3"]
    assert inspect(given, Console(file=out)) == 0
    parts = out.getvalue().split("\nsample ")[1:]
    stream = OBJECTIVES["wino_plus"](random_model("llada"), config).stream()
    for part, state in zip(parts, map(stream.sample, range(3)), strict=True):
        assert f"before step {stream.where(state.index).rsplit(' ', 1)[1]}" in part
        text = part.split("masked by block")[0].split("\n", 1)[1]
        assert text.count("[+") == state.now.sum() > 0
        assert text.count("[") == state.masked.sum()
    assert f"{len(stream.states)} states of {len(stream.rollouts)} rollouts" in out.getvalue()
    assert f"an epoch: {len(stream.states)} samples" in out.getvalue()


# The loss.


def objective_of(tmp_path, files, family: str, decoder: str, **wino) -> tuple[Objective, list]:
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
    config = settings(tmp_path, files[family, decoder], **{"tau1": 0.08, "tau2": 0.3} | wino)
    made = OBJECTIVES["wino_plus"](model, config)
    rows, _ = fill_rows(made.stream(), 0)
    return made, rows


def written_out(made, rows: list[list[Placed]]) -> tuple[Tensor, np.ndarray]:
    """The loss state by state as it is defined, from all logits; and the sizes of A, R, C and
    B without R, added over the states."""
    model, chosen, total = made.model, made.options, torch.zeros(())
    sizes, count = np.zeros(4, dtype=int), 0
    for sample in [placed.sample for row in rows for placed in row]:
        length, prompt = len(sample), len(sample.prompt)
        full = np.array(sample.prompt + sample.response)
        hidden = np.concatenate([np.zeros(prompt, dtype=bool), sample.masked])
        ids = torch.from_numpy(np.where(hidden, model.mask_id, full))[None]
        seen = spans.bidirectional(length)
        if chosen.mask == "block_causal":
            seen = spans.block_causal(length, prompt, made.options.block_size)
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
    parameters = [p for p in made.network.parameters() if p.requires_grad]
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
    monkeypatch.setattr(shared, "LOGITS_BYTES", 7 * 4 * made.model.vocab_size)
    loss = made.forward(made.batch(rows, slice(0, 8)))
    expected, sizes = written_out(made, rows)
    assert (sizes > 0).all()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    ours, theirs = gradient(loss, made), gradient(expected, made)
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_the_loss_does_not_depend_on_the_processes(tmp_path, files):
    """One without samples has a loss of zero."""
    made, rows = objective_of(tmp_path, files, "dream", "d2f", **BLOCK_CAUSAL)
    with torch.no_grad():
        whole = made.forward(made.batch(rows, slice(0, 8)))
        parts = [made.forward(made.batch(rows, slice(i, i + 4))) for i in (0, 4)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-5)
    loss = made.forward(made.batch([[], []], slice(0, 2)))
    loss.backward()
    assert loss.item() == 0.0


# Training.


@pytest.mark.parametrize(
    ("family", "decoder", "wino"),
    [("llada", "wino", {}), ("dream", "d2f", {"mask": "block_causal", "kl_weight": 0.2})],
)
def test_a_killed_run_resumes_to_the_bit_and_exports_what_decoding_must_know(
    tmp_path, files, base, family, decoder, wino
):
    changes = {"init": str(base[family])} | wino
    file = files[family, decoder]
    train(settings(tmp_path / "whole", file, **changes))
    for _ in range(2):
        train(settings(tmp_path / "killed", file, **changes), stop_after=3)
    assert same(tmp_path / "whole", tmp_path / "killed")
    merged = d2f.load(tmp_path / "whole" / "model")
    adapted = d2f.load(base[family], adapter=tmp_path / "whole" / "adapter")
    expected = ("d2f", "block", 4) if wino else ("wino_plus", "bidirectional", 4)
    for contract in (merged.contract, adapted.contract):
        assert (contract.objective, contract.prompt_rule, contract.block_size) == expected
    chosen = DecoderSettings(None, {}).decoder(merged, 16)  # what decodes it unless told otherwise
    assert (chosen.name, chosen.block_size) == ("d2f" if wino else "threshold", 4)
    ids = torch.randint(4, 200, (1, 12))
    with torch.no_grad():
        ours, theirs = (m.forward(ids, spans.bidirectional(12)) for m in (merged, adapted))
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


# Bad input.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tau1": 0.9, "tau2": 0.9}, "tau1 must be below tau2, got 0.9 and 0.9"),
        ({"scope": "row"}, "objective.scope"),
        ({"lambda": 0.1}, "objective.lambda"),
        ({"data": {"tasks": {"story": 1.0}}}, "needs data.file: a file of distill.rollouts"),
        ({"init": None, "family": "llada", "model": {}}, "wino_plus needs init"),
    ],
)
def test_a_bad_configuration_is_an_error(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        settings(tmp_path, Path("file"), **change)


@pytest.mark.parametrize(
    ("decoder", "header", "change", "message"),
    [
        ("wino", {"mask_id": 99}, {}, "another mask_id: expected 1, got 99"),
        ("wino", {"tokenizer": "f00"}, {}, "another tokenizer: .*got 'f00'"),
        ("d2f", {}, {}, "another mask: expected 'bidirectional', got 'block_causal'"),
        ("d2f", {}, BLOCK_CAUSAL | {"block_size": 8}, "line 2 was decoded in blocks of 4: expected "
         "those of block_size, 8"),
        ("wino", {}, {"data": {"row_length": 40, "rows": 2}}, "line 2 has .* tokens, "
         "data.row_length is 40"),
        ("wino", 5, {}, r"r\.jsonl is not a file of distill\.rollouts"),
    ],
)  # fmt: skip
def test_rollouts_that_do_not_fit_are_refused_before_training(
    tmp_path, files, base, decoder, header, change, message
):
    first, *lines = files["llada", decoder].read_text().splitlines(keepends=True)
    run = json.loads(first)["rollouts"] | header if isinstance(header, dict) else header
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"rollouts": run}) + "\n" + "".join(lines))
    with pytest.raises(InputError, match=message):
        train(settings(tmp_path / "out", path, init=str(base["llada"]), **change))
    assert not (tmp_path / "out").exists()
