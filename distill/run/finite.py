"""Whether a running training's loss, weights and moments are still numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from distill.run.sharding import own_part

_NEVER = torch.iinfo(torch.int64).max


class NonFiniteLossError(FloatingPointError):
    """The loss, its gradient, the weights or AdamW's moments became NaN or infinite; nothing of it
    was saved."""


class FiniteWatch:
    """Remembers the first step whose loss or gradient was not finite.

    `see` costs a few operations on the device and never waits for it; `check` does, and is called
    before anything is logged or saved.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        # [1], on the device, so that `see` need not wait for it.
        self.first = torch.full((1,), _NEVER, dtype=torch.int64, device=accelerator.device)
        self.samples: dict[int, list[int]] = {}  # of the steps since the last check

    def see(self, step: int, samples: list[int], loss: Tensor, norm: Tensor) -> None:
        """Take a step's loss and gradient norm, made from these sample indexes."""
        self.samples[step] = samples
        # fp16's scaler meets infinite gradients and skips those steps: they are no failure.
        seen = (loss, norm) if self.accelerator.scaler is None else (loss,)
        fine = torch.stack([value.detach().float().isfinite() for value in seen]).all()
        # The smallest of the steps that were not finite, kept without a branch on the host.
        self.first = torch.where(fine, self.first, self.first.clamp(max=step))

    def check(self) -> None:
        """Raise NonFiniteLossError, on all processes, if any process saw such a step."""
        # Gathered, so that all processes raise together and none waits for one that has ended.
        step = int(self.accelerator.gather(self.first).min())
        if step != _NEVER:
            raise NonFiniteLossError(
                f"the loss or its gradient is not finite at step {step} "
                f"(samples {ranges(self.samples[step])}); nothing of it was saved"
            )
        self.samples.clear()

    def check_state(
        self, step: int, parameters: Mapping[str, nn.Parameter], optimizer: Any
    ) -> None:
        """Raise NonFiniteLossError, on all processes, where the weights after `step` or their
        moments are not finite in any process. Called before they are saved or decoded with."""
        tensors = {
            (name, key): own_part(value)
            for name, parameter in parameters.items()
            for key, value in {"weight": parameter, **optimizer.state.get(parameter, {})}.items()
            if isinstance(value, Tensor)
        }
        device = self.accelerator.device
        fine = torch.stack([value.isfinite().all().to(device) for value in tensors.values()])
        # The place of the first tensor that is not finite; processes hold the same names in one
        # order.
        first = torch.where(fine.all(), _NEVER, (~fine).int().argmax())[None]
        worst = int(self.accelerator.gather(first).min())
        if worst != _NEVER:
            name, key = list(tensors)[worst]
            raise NonFiniteLossError(
                f"{name} ({key}) is not finite after step {step}, whose loss and gradient are; "
                "a lower optimizer.lr may help; nothing of it was saved"
            )


def ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` as ``3-5, 9``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
