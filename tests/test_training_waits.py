"""A training step hands its work to the GPU and goes on: nothing of it waits for a value to come
back to the host. Counted on the CPU, where reading a value is the same call."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
import wino_plus_runs
from test_train import settings
from tiny import random_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from d2f.saving import save_model
from distill.checkpoint import RunFolder
from distill.data import fill_rows
from distill.objectives import base as training_plan
from distill.objectives.base import Batch
from distill.trainer import Training

base, files = wino_plus_runs.base, wino_plus_runs.files  # fixtures

# What gives Python a value, or a shape that depends on values.
CALLS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
OPERATORS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2",
    "unique_dim", "unique_consecutive",
}  # fmt: skip


class Calls(TorchFunctionMode):
    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in CALLS:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, seen: Counter):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split("::")[1].split(".")[0]
        by_mask = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype == torch.bool
            for x in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        if name in OPERATORS or by_mask:
            self.seen[name] += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def counted():
    """How often the host reads something of a tensor, by what it calls."""
    seen: Counter = Counter()
    with Calls(seen), Operators(seen):
        yield seen


def step_of(config, monkeypatch):
    """What the second step of a run reads; its batch is made on the host before it."""
    training = Training(RunFolder(config))
    stepper = training.stepper
    rows, _ = fill_rows(training.stream, 0)
    stepper.take(0, rows)  # what is done once is behind it
    batch = stepper.objective.batch(rows, slice(0, config.data.rows))
    monkeypatch.setattr(stepper.objective, "batch", lambda *given: batch)
    monkeypatch.setattr(training_plan, "parts_of", lambda spans: None)  # a CPU's alone
    with counted() as seen:
        result = stepper.take(1, rows)
        training.watch.see(1, [], result.loss, result.norm)
    assert torch.isfinite(result.loss)
    return seen


def test_reading_a_value_is_counted():
    x = torch.arange(3)
    for read in (
        lambda: x.sum().item(), lambda: x.tolist(), lambda: x.cpu(), lambda: x.numpy(),
        lambda: bool(x[0]), lambda: int(x[0]), lambda: x[x > 0], lambda: x.nonzero(),
    ):  # fmt: skip
        with counted() as seen:
            read()
        assert seen
    with counted() as seen:
        x.index_select(0, x) * 2
    assert not seen


@pytest.mark.parametrize("objective", ["masked_diffusion", "next_token", "d2f", "wedlm"])
def test_a_step_reads_nothing_back(objective, tmp_path, monkeypatch):
    model = random_model({"next_token": "causal", "wedlm": "wedlm"}.get(objective, "llada"))
    save_model(model, tmp_path / "init", dtype=torch.float32)
    config = settings(tmp_path / "run", objective, init=str(tmp_path / "init"))
    assert step_of(config, monkeypatch) == {}


def test_wino_plus_asks_twice_which_rows_need_logits(base, files, tmp_path, monkeypatch):
    """Which tokens are deferred or sharpened, its own predictions say: without asking, logits of
    all read rows would be made, most of them for a weight of 0."""
    config = wino_plus_runs.settings(
        tmp_path / "run", files["llada", "d2f"], init=str(base["llada"]),
        wino_plus=wino_plus_runs.BLOCK_CAUSAL,
    )  # fmt: skip
    assert step_of(config, monkeypatch) == {"nonzero": 2}


def test_a_batch_is_copied_to_a_gpu_while_it_works(monkeypatch):
    batch = Batch(*(torch.zeros(2) for _ in range(3)), None, *(torch.zeros(2) for _ in range(3)))
    copied = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self + 1)

    def to(self, device, non_blocking):
        copied.append((bool(self.all()), device.type, non_blocking))
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    moved = batch.to(torch.device("cuda"))
    assert copied == [(True, "cuda", True)] * 6
    assert moved.teacher_spans is None
