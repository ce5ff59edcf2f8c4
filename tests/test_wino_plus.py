"""WINO+: the states of a trajectory, how they are drawn and shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import wino_plus_runs
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tiny import random_model
from wino_plus_runs import settings

import d2f
from distill.data import plan
from distill.data.__main__ import main as inspect
from distill.data.trajectories import (
    Rollout,
    StateStream,
    answer_length,
    random_steps,
    state_at,
)
from distill.objectives import OBJECTIVES
from distill.objectives.wino_plus import WinoPlusOptions

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
    mixed = settings(tmp_path, files["llada", "wino"], wino_plus={"trajectory": "random"})
    other = OBJECTIVES["wino_plus"](random_model("llada"), mixed).stream()
    assert len(other.states) == count
    assert any((a != b).any() for a, b in zip(stream.steps, other.steps, strict=True))


def test_inspect_shows_what_is_decided_next(tmp_path, files, base):
    """The states that training sees, as the stream gives them."""
    config = settings(tmp_path / "out", files["llada", "wino"], init=str(base["llada"]))
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    out = io.StringIO()
    inspect(["--inspect", "--config", str(path), "--samples", "3"], Console(file=out))
    parts = out.getvalue().split("\nsample ")[1:]
    model = d2f.load(base["llada"])
    stream = OBJECTIVES["wino_plus"](model, config).stream()
    assert len(parts) == 3 and stream.epoch == len(stream.states)
    for part, state in zip(parts, map(stream.sample, range(3)), strict=True):
        assert f"before step {stream.where(state.index).rsplit(' ', 1)[1]}" in part
        text = part.split("masked by block")[0].split("\n", 1)[1]
        assert text.count("[+") == state.now.sum() > 0
        assert text.count("[") == state.masked.sum()
    assert f"{len(stream.states)} states of {len(stream.rollouts)} rollouts" in out.getvalue()
    assert f"an epoch: {len(stream.states)} samples" in out.getvalue()
