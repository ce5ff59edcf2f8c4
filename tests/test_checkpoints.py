"""Checkpoints: whole or not there, damage is known and passed over, a full disk costs nothing."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from d2f.errors import CheckpointError
from distill import checkpoint


def state(step: int) -> dict:
    weights = {"w": torch.full((50,), float(step))}
    return {"step": step, "sample": 3 * step, "weights": weights, "optimizer": {}}


def saved(folder: Path, *steps: int, keep: int = 3) -> Path:
    for step in steps:
        checkpoint.save(folder, step, state(step), keep)
    return folder


def cut(place: Path) -> None:
    file = place / checkpoint.STATE
    file.write_bytes(file.read_bytes()[:-7])


def flip(place: Path) -> None:
    file = place / checkpoint.STATE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "cut short": cut,
    "one bit": flip,
    "no state": lambda place: (place / checkpoint.STATE).unlink(),
    "code": lambda place: torch.save({"step": print}, place / checkpoint.STATE),
}


def test_the_newest_comes_back_as_it_was_and_only_keep_stay(tmp_path):
    saved(tmp_path, 2, 4, 6, 8, keep=2)
    assert checkpoint.steps(tmp_path) == [6, 8]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        came = checkpoint.newest(tmp_path)
    assert (came["step"], came["sample"]) == (8, 24)
    assert torch.equal(came["weights"]["w"], state(8)["weights"]["w"])
    assert checkpoint.newest(tmp_path / "none") is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_is_named_and_the_one_before_used(tmp_path, damage):
    saved(tmp_path, 2, 4)
    DAMAGES[damage](tmp_path / "step-0000004")
    with pytest.warns(UserWarning, match="damaged checkpoint passed over: .*step-0000004") as said:
        assert checkpoint.newest(tmp_path)["step"] == 2
    assert "\n" not in str(said[0].message)


def test_where_all_are_damaged_the_run_does_not_begin_again_unasked(tmp_path):
    saved(tmp_path, 2, 4)
    for place in list(tmp_path.iterdir()):
        flip(place)
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="no whole checkpoint"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_of_a_later_step_is_not_kept_in_place_of_a_whole_one(tmp_path, keep):
    """The run went on from step 2 and saved 3 before it came to the damaged 4 again."""
    saved(tmp_path, 2, 4)
    cut(tmp_path / "step-0000004")
    saved(tmp_path, 3, keep=keep)
    assert checkpoint.steps(tmp_path) == [2, 3][-keep:]
    saved(tmp_path, 4, keep=keep)
    assert checkpoint.newest(tmp_path)["step"] == 4


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("torch's writer")])
def test_a_full_disk_leaves_the_previous_checkpoint_and_says_so(tmp_path, monkeypatch, error):
    saved(tmp_path, 2)

    def full(state, file) -> None:
        file.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", full)
        with pytest.raises(CheckpointError, match=r"step 4 could not be written.*step 2 is kept"):
            checkpoint.save(tmp_path, 4, state(4), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000002"]
    saved(tmp_path, 4)
    assert checkpoint.newest(tmp_path)["step"] == 4


@pytest.mark.parametrize(
    ("call", "nth"), [("fsync", 1), ("rename", 1), ("rmtree", 1), ("rmtree", 2)]
)
def test_a_kill_at_any_moment_of_saving_leaves_a_whole_one(tmp_path, monkeypatch, call, nth):
    """Killed before each thing that saving does to the disk: the newest is the old or the new."""
    saved(tmp_path, 2)
    owner = {"fsync": checkpoint.os, "rename": Path, "rmtree": checkpoint.shutil}[call]
    plain, left = getattr(owner, call), [nth]

    def kill(*arguments, **more):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt  # as a kill: nothing that handles errors sees it
        return plain(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, kill)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 4, state(4), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.newest(tmp_path)["step"] in (2, 4)
    saved(tmp_path, 4, 5, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000005"]
