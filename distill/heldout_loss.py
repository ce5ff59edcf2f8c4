"""Measure the held-out loss: cross-entropy of masked answers, and KL to the teacher.

The samples are never trained on, and their masks are the same in every evaluation. Each sample is
fed once for each mask ratio r of `evaluation.loss_ratios`, its response tokens masked with
probability r, and read under the student's spans. Of the masked answer tokens (the tail of end
tokens behind them is fed and not counted)

    cross-entropy(r) = mean of -log p(token),   kl(r) = mean of KL(teacher || student)

in nats a masked token; the mean over the ratios is the loss itself. The masks of a sample come from
one draw for all ratios, so that what a lower ratio hides a higher one hides too:

    r = 0.3    a b M d e f
    r = 0.7    a M M d M M
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2f.errors import InputError
from distill.data.samples import HeldOut, Placed, Sample
from distill.objectives.base import Objective, gathered, weighted_cross_entropy
from triton_kernels.masked_kl import masked_linear_kl

Sums = NDArray[np.float64]


class HeldoutLoss:
    """Measure an objective's model on samples that are held out.

    Raises InputError, before any weight is read, for a ratio that masks none of their tokens.
    """

    def __init__(self, objective: Objective, held_out: HeldOut):
        config = objective.config
        self.objective = objective
        self.batch_size = config.evaluation.batch_size
        # The samples of a forward are of like length, and one that needs too much memory is first.
        self.samples = sorted(held_out.samples, key=len, reverse=True)
        self.names = ["cross_entropy", *(["kl"] if config.objective.has_teacher else [])]
        self.ratios: tuple[float | None, ...] = (None,)
        self._shares: dict[str, tuple[float, float]] = {}
        if config.objective.masks_by_ratio:
            self.ratios = config.evaluation.loss_ratios
        for ratio in self.ratios:
            tried = objective.for_held_out(ratio, len(self.samples[0]))
            if ratio and not any(tried.draw(s)[1].any() for s in self.samples):
                raise InputError(
                    f"evaluation.loss_ratios: {ratio} masks no token of the held-out samples "
                    f"({held_out.said}): expected higher ratios or more samples"
                )

    def measure(self) -> dict[str, float]:
        """Return values for the log by name: of each loss the mean over the ratios, each ratio's
        own, and their standard errors over samples (where there are two)."""
        sums = {name: np.zeros((len(self.samples), len(self.ratios))) for name in self.names}
        self._shares.clear()
        tokens = np.zeros((len(self.samples), len(self.ratios)))
        for first in range(0, len(self.samples), self.batch_size):
            part = slice(first, first + self.batch_size)
            for r, ratio in enumerate(self.ratios):
                found = self._sums(self.samples[part], ratio)
                tokens[part, r] = found.pop("tokens")
                for name, by_sample in found.items():
                    sums[name][part, r] = by_sample
        values: dict[str, float] = {}
        for name in self.names:
            values |= summary(f"evaluation/{name}", sums[name], tokens, self.ratios)
        for name, (some, of) in self._shares.items():
            values[f"evaluation/{name}"] = some / max(of, 1.0)
        return values

    @torch.no_grad()
    def _sums(self, samples: list[Sample], ratio: float | None) -> dict[str, Sums]:
        """Count each sample's masked answer tokens and sum their losses, ``[samples]`` each."""
        objective = self.objective.for_held_out(ratio, len(samples[0]))
        model = objective.model
        # Put one sample into a row, so that the row says which sample a masked token is of.
        rows = [[Placed(sample, 0)] for sample in samples]
        batch = objective.batch(rows, slice(0, len(rows))).to(model.device)
        counted = objective.counted(batch)  # [N]
        owner = batch.rows // batch.input_ids.shape[1]  # [N]
        teacher = objective.read_teacher(batch) if "kl" in self.names else None
        student = objective.read(batch, batch.spans)  # [N, C]
        head = gathered(model.backbone.lm_head.weight)
        found: dict[str, list[Tensor]] = {name: [] for name in ("tokens", *self.names)}
        for i in range(len(samples)):
            mine = counted & (owner == i)
            ones = mine[mine].float()
            found["tokens"].append(ones.sum())
            logits = model.head(student[mine])
            found["cross_entropy"].append(weighted_cross_entropy(logits, batch.targets[mine], ones))
            if teacher is not None:
                found["kl"].append(masked_linear_kl(student[mine], teacher[mine], head, ones))
        for name, (some, of) in objective.held_out_shares(batch, student, teacher).items():
            before = self._shares.get(name, (0.0, 0.0))
            self._shares[name] = before[0] + some, before[1] + of
        return {name: torch.stack(values).double().cpu().numpy() for name, values in found.items()}


def summary(
    name: str, sums: Sums, tokens: Sums, ratios: tuple[float | None, ...]
) -> dict[str, float]:
    """Return means a token by ratio and over the ratios, each with its standard error, by name.

    sums, tokens: ``[samples, ratios]``. A mean is a ratio of two sums over samples, s_i and n_i;
    its error is that of the mean of the residuals (s_i - mean n_i) / sum of n (the linearised
    estimator of survey sampling), in which a sample's ratios are one draw.
    """
    mean = sums.sum(0) / tokens.sum(0)
    residual = (sums - mean * tokens) / tokens.sum(0)
    values = {name: float(mean.mean())}
    by_ratio = [(r, ratio) for r, ratio in enumerate(ratios) if ratio is not None]
    values |= {f"{name}/{ratio}": float(mean[r]) for r, ratio in by_ratio}
    if len(sums) > 1:
        scale = len(sums) / (len(sums) - 1)
        error = np.sqrt(scale * (residual**2).sum(0))
        values[f"{name}_stderr"] = float(np.sqrt(scale * (residual.mean(1) ** 2).sum()))
        values |= {f"{name}_stderr/{ratio}": float(error[r]) for r, ratio in by_ratio}
    return values


def loss_text(values: Mapping[str, Any]) -> list[str]:
    """Describe the held-out losses among logged values."""
    found = []
    for name, words in (("cross_entropy", "cross-entropy"), ("kl", "KL")):
        value, error = (values.get(f"evaluation/{name}{end}") for end in ("", "_stderr"))
        if value is not None:
            found.append(f"{words} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
    return found
