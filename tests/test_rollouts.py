"""Rollouts: which forward decided every token for good, verified answers only, resumable."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import random_model

import d2f
import decode
from d2f.errors import InputError
from d2f.saving import save_model
from d2f.tasks import check, find_tasks, make_problems
from decode.cli import DecoderSettings
from decode.decoders.d2f import D2FSession
from distill import rollouts
from distill.objectives.wino_plus import Rollout, read_rollouts, tokenizer_hash
from distill.rollouts import Trajectory, TrajectoryJob, collect, make_jobs

WINO = {"block_size": 8, "tau1": 0.1, "tau2": 0.9}
D2F = {"block_size": 4, "tau_conf": 0.1}
REVOKING = D2F | {"revoke": "always", "tau_revoke": 0.9}
KINDS = [("wino", WINO), ("d2f", D2F), ("d2f", REVOKING)]


def jobs_of(family: str, name: str, given: dict, count: int = 5) -> list[TrajectoryJob]:
    settings = DecoderSettings(name, given | {"early_exit": False})
    return make_jobs(random_model(family), settings, find_tasks(["countdown"]), count, 0)


@pytest.fixture
def lenient(monkeypatch):
    """Random models solve nothing: about half of their responses count as right."""
    monkeypatch.setattr("d2f.tasks.task.GeneratedTask.right", accepted)


def accepted(task, problem, text: str) -> bool:
    return len(text) % 2 == 0


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setattr("d2f.tasks.task.GeneratedTask.right", lambda *_: True)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(("name", "given"), KINDS)
def test_a_trajectory_holds_the_step_from_which_each_token_stays(family, name, given):
    """By its definition, from a copy of the response after every forward."""
    revoked = 0
    for job in jobs_of(family, name, given):
        trajectory, history = Trajectory(name == "d2f"), []
        for event in decode.stream(random_model(family), [job.ids], job.decoder):
            trajectory.add(event)
            history.append([t for view in event.blocks for t in view.tokens])
            result = event.result
        rollout = trajectory.rollout(job, result, 0.0)
        final = list(rollout.generated_ids)
        assert final == result.raw_tokens == history[-1]
        held = np.array(
            [
                [t == y for t, y in zip([*h, *[None] * len(final)], final, strict=False)]
                for h in history
            ]
        )
        steps = [
            min(t for t in range(len(history)) if held[t:, i].all()) for i in range(len(final))
        ]
        assert list(rollout.trajectory_accepted) == steps
        assert list(rollout.trajectory_proposed) == held.argmax(0).tolist()
        assert rollout.decoding_steps == len(history)
        revoked += result.counts.get("revoked", 0)
        if name == "wino":  # its blocks are decided one after the other
            blocks = np.array(steps).reshape(-1, 8)
            assert all(a.max() < b.min() for a, b in pairwise(blocks))
            assert set(rollout.append_steps) == {0}
    assert (revoked > 0) == (given is not D2F)


def test_the_append_steps_say_what_every_forward_fed(monkeypatch):
    """Unshifted and without shadows, a forward of the pipeline could feed all that is there."""
    monkeypatch.setattr(D2FSession, "needed_end", lambda self: self.pipeline[-1].end)
    for job in jobs_of("llada", "d2f", D2F):
        trajectory = Trajectory(pipelined=True)
        for event in decode.stream(random_model("llada"), [job.ids], job.decoder):
            trajectory.add(event)
        rollout = trajectory.rollout(job, event.result, 0.0)
        assert len(set(rollout.append_steps)) > 1
        for t, (fed, cached) in enumerate(event.result.calls):
            blocks = sum(step <= t for step in rollout.append_steps)
            there = min(blocks * rollout.block_size, len(rollout.generated_ids))
            assert fed + cached == len(job.ids) + there


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize(("name", "given"), KINDS)
def test_rollouts_of_a_batch_are_those_of_one_by_one(trusting, family, name, given):
    jobs, ladder = jobs_of(family, name, given, 4), (0.7,)
    alone, together = (
        dict(collect(random_model(family), enumerate(jobs), temperatures=ladder, batch_size=size))
        for size in (1, 4)
    )
    assert alone == together and len(alone) == len(jobs)
    late = dict(collect(random_model(family), [*enumerate(jobs)][3:], temperatures=ladder))
    assert late == {number: alone[number] for number in (3,)}


def test_wrong_answers_are_not_kept_and_the_ladder_stops_at_the_first_right_one(lenient):
    model, jobs = random_model("llada"), jobs_of("llada", "wino", WINO, 10)
    ladder = (0.0, 1.0)
    single = [dict(collect(model, enumerate(jobs), temperatures=(t,))) for t in ladder]
    found = dict(collect(model, enumerate(jobs), temperatures=ladder, batch_size=5))
    # In chunks of 8 and all at once.
    assert dict(collect(model, enumerate(jobs), temperatures=ladder, batch_size=2)) == found
    for number in range(len(jobs)):
        rungs = [rung for rung, kept in enumerate(single) if kept[number] is not None]
        assert found[number] == (single[rungs[0]][number] if rungs else None)
        assert found[number] is None or accepted(None, None, found[number].text)
    used = {rollout.used_temperature for rollout in found.values() if rollout is not None}
    assert len(used) > 1 and None in single[0].values()


def test_the_bundled_teacher_is_judged_by_the_checker(tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    arguments = ["--model", "tiny-teacher", "--tasks", "sudoku", "--problems", "8"]
    assert rollouts.main([*arguments, "--block-size", "8", "--output", str(path)]) == 0
    run, found = read_rollouts(path)
    problems = make_problems("sudoku", "train", 8)
    right = [check(problems[int(r.unique_id.removeprefix("sudoku-")) - 1], r.text) for r in found]
    assert all(right)
    assert f"{len(found)} of 8 right and kept" in capsys.readouterr().out
    assert run["options"]["early_exit"] is False and run["decoder"] == "wino"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_model(random_model("llada"), folder, dtype=torch.float32)
    return str(folder)


def command(model: str, path: Path, *more: str) -> list[str]:
    options = ["--tasks", "countdown,sudoku", "--problems", "5", "--temperatures", "0,0.8"]
    return ["--model", model, "--output", str(path), "--block-size", "8", *options, *more]


def test_a_resumed_collection_is_the_uninterrupted_one(lenient, saved, tmp_path):
    """Killed anywhere, also within a line; and on another batch size."""
    whole, seed = tmp_path / "whole.jsonl", ("--seed", "3")
    assert rollouts.main(command(saved, whole, *seed)) == 0
    data = whole.read_bytes()
    lines = data.splitlines(keepends=True)
    assert 3 < len(lines) < 11  # some were wrong
    path = tmp_path / "killed.jsonl"
    for cut in (len(lines[0]), len(lines[0] + lines[1]), len(lines[0]) + 9, len(data) - 1):
        path.write_bytes(data[:cut])
        assert rollouts.main(command(saved, path, *seed, "--batch-size", "3")) == 0
        assert path.read_bytes() == data
    assert rollouts.main(command(saved, path, *seed)) == 0
    assert path.read_bytes() == data


def test_the_file_begins_with_what_decides_its_rollouts(lenient, saved, tmp_path):
    path = tmp_path / "out.jsonl"
    assert rollouts.main(command(saved, path, "--seed", "3", "--device", "cpu")) == 0
    run, found = read_rollouts(path)
    model = d2f.load(saved, device="cpu")
    options = run.pop("options")
    assert run == {
        "version": d2f.__version__, "model": saved, "adapter": None, "merged": False,
        "family": "llada",
        "weights": run["weights"], "tokenizer": tokenizer_hash(model.tokenizer),
        "mask_id": model.mask_id, "end_ids": list(model.end_ids), "mask": "bidirectional",
        "dtype": "float32", "device": "cpu",
        "compiled": False, "decoder": "wino", "tasks": ["countdown", "sudoku"], "problems": 5,
        "seed": 3, "temperatures": [0.0, 0.8],
    }  # fmt: skip
    given = {"block_size": 8, "early_exit": False, "max_new_tokens": None, "stop": []}
    assert options == vars(decode.Wino()) | given
    assert len(run["weights"]) == 64 and {r.source for r in found} <= {"countdown", "sudoku"}
    both = tmp_path / "d2f.jsonl"
    assert rollouts.main(command(saved, both, "--decoder", "d2f")) == 0
    assert read_rollouts(both)[0]["mask"] == "block_causal"


def test_a_file_of_another_run_is_refused_and_kept(trusting, saved, tmp_path, capsys):
    path = tmp_path / "out.jsonl"
    assert rollouts.main(command(saved, path)) == 0
    data = path.read_bytes()
    assert rollouts.main(command(saved, path, "--seed", "1")) == 2
    assert "seed was 0, now 1" in capsys.readouterr().err and path.read_bytes() == data
    path.write_bytes(b"some notes\n")
    assert rollouts.main(command(saved, path)) == 2
    assert "is not an output of this command" in capsys.readouterr().err
    assert path.read_bytes() == b"some notes\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "chess"], "there is no task or task file 'chess'; expected one of story"),
        (["--problems", "0"], "--problems must be at least 1, got 0"),
        (["--temperatures", "0,warm"], "--temperatures must be numbers of 0 or more, got '0,warm'"),
        (["--tau1", "0.9"], "tau1 must be below tau2"),
        (["--decoder", "d2f", "--tau1", "0.5"], "the decoder d2f has no option tau1"),
        (["--output", "nowhere/out.jsonl"], "expected a file in a folder"),
    ],
)
def test_a_bad_command_line_is_an_error_before_any_work(
    saved, tmp_path, capsys, arguments, message
):
    path = tmp_path / "out.jsonl"
    assert rollouts.main(["--model", saved, "--output", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not path.exists()


GOOD = {
    "unique_id": "sudoku-1",
    "source": "sudoku",
    "prompt_ids": [5, 6],
    "generated_ids": [7, 8, 9],
    "trajectory_accepted": [0, 2, 1],
    "trajectory_proposed": [0, 0, 1],
    "append_steps": [0, 1],
    "block_size": 2,
    "decoding_steps": 3,
    "used_temperature": 0.0,
    "text": "1",
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trajectory_accepted": [0, 2]}, "a step for each of the 3 generated ids"),
        ({"trajectory_accepted": [0, 3, 1]}, "below decoding_steps 3"),
        ({"trajectory_accepted": [0, -1, 1]}, "trajectory_accepted.1"),
        ({"append_steps": [0]}, "append_steps: expected one for each block, got 1"),
        ({"append_steps": [0, 2]}, "steps in which the token's block is there"),
        ({"generated_ids": []}, "generated_ids"),
        ({"colour": "red"}, "colour"),
        (None, "Invalid JSON: EOF"),  # of a command that was killed
    ],
)
def test_a_broken_line_is_named_by_file_and_line(tmp_path, change, message):
    path = tmp_path / "rollouts.jsonl"
    header, good = json.dumps({"rollouts": {"decoder": "wino"}}), json.dumps(GOOD)
    path.write_text("\n".join([header, good, ""]))
    assert read_rollouts(path)[1] == [Rollout.model_validate_json(good)]
    bad = good[:90] if change is None else json.dumps(GOOD | change)
    path.write_text("\n".join([header, good, bad]))
    with pytest.raises(InputError, match=f"{path}, line 3: .*{message}"):
        read_rollouts(path)
    path.write_text(header)
    with pytest.raises(InputError, match="at least one rollout"):
        read_rollouts(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_rollouts(tmp_path / "none.jsonl")
