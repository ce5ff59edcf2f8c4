"""Noise schedules by name, states recorded from the decoder, and mixtures of block sizes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from block_tiny import student
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model

import decode
import decode.record_states
from d2f.errors import InputError
from d2f.noise import PipelineStates, read_states
from d2f.saving import save_model
from d2f.spans import block_causal
from decode.decoders.d2f import D2FSession
from distill.config import parse_config
from distill.data.samples import Placed, Sample
from distill.objectives import OBJECTIVES
from distill.train import train


def settings(output="unused", **changes):
    values = {
        "objective": "d2f",
        "output": str(output),
        "init": "unused",
        "block_size": 4,
        "data": {"tasks": {"countdown": 1.0}, "row_length": 96, "rows": 2},
        "steps": 1,
        "tracker": "none",
    }
    return parse_config(values | changes, "test")


def objective(**changes):
    return OBJECTIVES["d2f"](random_model("llada"), settings(**changes))


def sample(index, response=24):
    return Sample(index, [5, 6, 7], [8] * response, response)


def blocks_of(ratios, size):
    return [ratios[i] for i in range(0, len(ratios), size)]


@pytest.mark.parametrize(("name", "low"), [("code", 0.2), ("paper", 0.3)])
def test_the_published_schedules_are_monotone_in_their_bounds(name, low):
    config = settings(noise={"schedule": name}).objective.noise
    assert (config.low, config.high, config.monotone_share) == (low, 0.7, 1.0)
    made = objective(noise={"schedule": name})
    plain = objective(noise={"low": low, "high": 0.7})
    for i in range(20):
        ratios, weight = made.state(sample(i))
        assert (ratios == plain.state(sample(i))[0]).all(), "as by the keys that it sets"
        assert (np.diff(blocks_of(ratios, 4)) >= 0).all()
        assert ratios.min() >= low
        assert weight == pytest.approx(1 / ratios)


def test_the_random_schedule_is_in_no_order_and_fills_its_bounds():
    made = objective(noise={"schedule": "random", "low": 0.1, "high": 0.9})
    states = np.array([blocks_of(made.state(sample(i))[0], 4) for i in range(300)])
    assert states.min() >= 0.1
    assert states.max() <= 0.9
    for column in states.T:  # each block uniform on its own: five standard deviations
        assert abs(column.mean() - 0.5) < 5 * 0.8 / 12**0.5 / 300**0.5
    assert 0 < (np.diff(states) < 0).mean() < 1


def test_what_lies_beyond_the_first_appended_block_weighs_as_far():
    """The pipeline's states without a recording: that block is decoded next, those after it are
    there for the model to see."""
    made = objective(noise={"schedule": "pipeline", "far_weight": 0.125})
    seen = set()
    for i in range(40):
        ratios, weight = made.state(sample(i))
        appended = np.append(ratios, 1.0).tolist().index(1.0)  # where appended blocks begin
        for place, (ratio, came) in enumerate(zip(ratios, weight, strict=True)):
            far = place >= appended + 4
            seen.add(far)
            assert came == (0.125 if far else pytest.approx(1 / ratio) if ratio else 1.0)
    assert seen == {False, True}


def test_of_a_clean_prefix_only_the_current_block_is_read():
    """Block diffusion's training: before it all is clean, after it all is masked and not learnt.
    The weights are those of a mean over what is read: 1 / ratio over the number of tokens."""
    made = objective(noise={"schedule": "clean_prefix", "min_ratio": 0.25})
    samples, starts, inverse, read = [sample(i, response=22) for i in range(60)], set(), [], []
    batch = made.batch([[Placed(s, 0)] for s in samples], slice(0, 60))
    for row, each in enumerate(samples):
        ratios, weight = made.state(each)
        start = int((ratios == 0).sum())
        end = min(start + 4, 22)
        at = ratios[start]
        assert ratios.tolist() == [0.0] * start + [at] * (end - start) + [1.0] * (22 - end)
        assert 0.25 <= at <= 1
        assert (weight[start:end] == 1 / at).all() and not weight[end:].any()
        starts.add(start)
        masked, _ = made.draw(each)
        hidden = batch.input_ids[row, 3:25] == made.model.mask_id
        assert (hidden.numpy() == masked).all() and masked[end:].all()
        current = start + np.flatnonzero(masked[start:end])
        read += (row * 96 + 3 + current).tolist()
        inverse += [1 / at] * len(current)
    assert starts == {0, 4, 8, 12, 16, 20}, "each block is the current one of some sample"
    assert batch.rows.tolist() == read
    assert batch.weight.numpy() == pytest.approx(np.array(inverse) / len(read), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": "code", "low": 0.3}, "schedule code sets low to 0.2, got 0.3"),
        ({"schedule": "pipeline", "monotone_share": 0.5}, "sets monotone_share to 0.0, got 0.5"),
        ({"schedule": "sorted"}, "noise.schedule"),
        ({"states": "file.json"}, "states are drawn by the samples that monotone_share leaves"),
    ],
)
def test_a_schedule_that_contradicts_is_an_error(changes, message):
    with pytest.raises(InputError, match=message):
        settings(noise=changes)


def test_a_size_is_drawn_per_sample_by_its_share():
    made = objective(block_size={"4": 1.0, "8": 3.0})
    drawn = [made.block_size(sample(i)) for i in range(400)]
    assert abs(drawn.count(8) / 400 - 0.75) < 5 * (0.75 * 0.25 / 400) ** 0.5
    assert drawn == [made.block_size(sample(i)) for i in range(400)]
    for i in range(10):
        want = block_causal(27, 3, drawn[i])
        assert torch.equal(made.sample_spans(sample(i)), want)
        ratios, _ = made.state(sample(i))
        assert np.repeat(blocks_of(ratios, drawn[i]), drawn[i])[:24].tolist() == ratios.tolist()
    assert objective(block_size=[8, 4, 8]).config.objective.block_shares == {8: 2 / 3, 4: 1 / 3}


STATES = PipelineStates({4: [[1.0], [0.25, 1.0], [0, 0.5, 0.75], [0, 0, 1.0]]})


@given(st.integers(1, 30), st.integers(0, 999))
def test_a_recorded_state_is_drawn_as_it_was_and_masked_beyond(length, seed):
    ratios, end = STATES.draw(length, 4, np.random.default_rng(seed))
    blocks = blocks_of(ratios, 4)
    assert len(ratios) == length
    assert any(r > 0 for r in blocks)
    matching = [s for s in STATES.by_size[4] if blocks == [*s, *[1.0] * len(blocks)][: len(blocks)]]
    assert any(end == min(4 * len(s), length) for s in matching)


def test_training_weighs_what_no_state_had_opened_as_far(tmp_path):
    path = tmp_path / "states.json"
    PipelineStates({4: [[0.25, 1.0]]}).save(path)
    made = objective(noise={"schedule": "pipeline", "states": str(path), "far_weight": 0.1})
    ratios, weight = made.state(sample(0, 13))
    assert ratios.tolist() == [0.25] * 4 + [1.0] * 9
    assert weight.tolist() == [4.0] * 4 + [1.0] * 4 + [0.1] * 5
    with pytest.raises(InputError, match=r"expected states of the block sizes \[8\], got \[4\]"):
        objective(noise={"schedule": "pipeline", "states": str(path)}, block_size=8)


def test_recorded_states_are_what_each_forward_feeds(monkeypatch):
    """One state a forward; its masks are the rows that the forward reads."""
    model = student("dream", 4, 0)
    prompts = [[5, 9, 20, 31], [7, 30]]
    decoder = decode.D2F(tau_conf=0.3, max_new_tokens=18)
    results = decode.generate(model, prompts, decoder)
    states = decode.record_states.record(model, prompts, decoder, batch_size=2)
    assert len(states) == sum(result.forwards for result in results)
    assert states.count((1.0,)) >= 2
    assert any(0 < ratio < 1 for state in states for ratio in state)
    assert any(len(state) > 1 for state in states)
    assert all(any(state) for state in states)
    alone = [decode.record_states.record(model, [p], decoder, batch_size=1) for p in prompts]
    assert sorted(states) == sorted(alone[0] + alone[1])
    read, step = [], D2FSession.step

    def watched(self):
        made = step(self)
        read.append(0 if made is None else len(made.read))
        return made

    monkeypatch.setattr(D2FSession, "step", watched)
    states = decode.record_states.record(model, prompts[:1], decoder, batch_size=1)
    masks = [sum(r * min(4, 18 - 4 * i) for i, r in enumerate(state)) for state in states]
    assert [*masks, 0] == pytest.approx(read)


def test_the_command_records_a_file_that_training_takes(tmp_path, capsys):
    """python -m decode.record_states --model FOLDER --tasks countdown --output FILE, and then
    training."""
    folder, path = tmp_path / "model", tmp_path / "made" / "states.json"
    save_model(random_model("llada"), folder, dtype=torch.float32)
    arguments = ["--model", str(folder), "--tasks", "countdown", "--problems", "2"]
    arguments += ["--block-sizes", "4,8", "--tau-conf", "0.4", "--device", "cpu"]
    assert decode.record_states.main([*arguments, "--output", str(path)]) == 0
    assert "block size 8:" in capsys.readouterr().out
    assert json.loads(path.read_text())["about"]["tau_conf"] == 0.4
    assert list(read_states(path).by_size) == [4, 8]
    config = settings(
        tmp_path / "run", init=str(folder), block_size=[8, 4],
        noise={"schedule": "pipeline", "states": str(path)},
    )  # fmt: skip
    train(config)
    contract = json.loads((tmp_path / "run" / "model" / "d2f_contract.json").read_text())
    assert contract["block_size"] == 8, "the first of the sizes"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ('{"states": {"4": [[0, 0]]}}', "a state without a mask"),
        ('{"states": {"4": [[1.5]]}}', "4.0.0: expected at most 1, got 1.5"),
        ('{"states": {"four": [[1]]}}', "expected the states"),
        ('{"states": {}}', "or none"),
    ],
)
def test_a_bad_file_of_states_is_named(tmp_path, text, message):
    (tmp_path / "states.json").write_text(text)
    with pytest.raises(InputError, match=f"states.json.*{message}"):
        read_states(tmp_path / "states.json")
