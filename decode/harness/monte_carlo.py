"""Estimate how likely a text is to a model that reads both sides: LLaDA's Monte Carlo estimate.

It estimates a lower bound of log p(target | prompt) (arXiv 2502.09992, equation 6): of a target of
L tokens, l are masked, each l in 1..L as likely, which ones drawn without replacement; the
log-probabilities of the masked tokens are summed and scaled by L / l::

    target  a b c      l = 2:  a _ _   3/2 (log p(b | a) + log p(c | a))

The l of a group of draws are spread evenly over 1..L from a random start, as in the official code
(which rounds, so that some l come more often than others; here each is exactly as likely). Draws
of a group depend on each other, groups do not: the standard error is that of the groups' mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from d2f import spans
from d2f.model import DiffusionModel

MOST_GROUPS = 8
Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class Score:
    """The likelihood of a target.

    loglikelihood: in nats. standard_error: 0 where it is exact, None where one group of draws
    cannot tell. greedy: greedy decoding gives the target. forwards: calls of the model that its
    rows were in.
    """

    loglikelihood: float
    standard_error: float | None
    greedy: bool
    forwards: int

    @staticmethod
    def total(scores: Sequence[Score]) -> Score:
        """Add the scores of parts, whose masks are drawn apart: their variances add up."""
        errors = [score.standard_error for score in scores]
        return Score(
            sum(score.loglikelihood for score in scores),
            None if None in errors else sum(error**2 for error in errors if error) ** 0.5,
            all(score.greedy for score in scores),
            sum(score.forwards for score in scores),
        )


@dataclass(frozen=True)
class MonteCarlo:
    """Estimate likelihoods.

    draws: masks for each target (`mc_num`). batch_size: of a forward. guidance: scale of
    classifier-free guidance, 0 is off: logits l become u + (1 + scale) (l - u), where the prompt is
    masked for u. check_greedy: find out what greedy decoding gives, which takes up to a forward a
    token; otherwise `Score.greedy` is False.
    """

    draws: int
    batch_size: int
    guidance: float = 0.0
    check_greedy: bool = True

    def score(
        self, model: DiffusionModel, prompt: list[int], target: list[int], seed: int
    ) -> Score:
        """Estimate the likelihood of a target behind a prompt, each of a token or more."""
        rng = np.random.default_rng(seed)
        parts = np.array_split(np.arange(self.draws), min(MOST_GROUPS, self.draws))
        masks = [draw_masks(len(target), len(part), rng) for part in parts]
        values = self.values(model, prompt, target, np.concatenate(masks))
        means = np.array([group.mean() for group in np.split(values, [p[0] for p in parts[1:]])])
        error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else None
        forwards = -(-self.draws // self.batch_size) * self._calls
        greedy, steps = False, 0
        if self.check_greedy:
            greedy, steps = self._greedy(model, prompt, target)
        return Score(float(means.mean()), error, greedy, forwards + steps)

    @property
    def _calls(self) -> int:
        return 2 if self.guidance else 1

    def values(
        self, model: DiffusionModel, prompt: list[int], target: list[int], masks: Masks
    ) -> NDArray[np.float64]:
        """Return what each of the masks ``[N, L]`` gives for the target, ``[N]``."""
        found = []
        for part in np.split(masks, range(self.batch_size, len(masks), self.batch_size)):
            logs = self._log_probabilities(model, prompt, target, part)  # [M, V]
            rows, places = np.nonzero(part)
            wanted = torch.tensor(target, device=logs.device)[
                torch.from_numpy(places).to(logs.device)
            ]
            each = logs.gather(-1, wanted[:, None])[:, 0].double().cpu().numpy()  # [M]
            sums = np.bincount(rows, weights=each, minlength=len(part))
            found.append(sums * part.shape[1] / part.sum(1))
        return np.concatenate(found)

    @torch.inference_mode()
    def _log_probabilities(
        self, model: DiffusionModel, prompt: list[int], target: list[int], masks: Masks
    ) -> Tensor:
        """Return log-probabilities ``[M, V]`` at the M masked positions, row after row."""
        ids = torch.tensor([prompt + target] * len(masks), device=model.device)  # [N, P + L]
        masked = torch.from_numpy(masks).to(model.device)
        assert model.mask_id is not None
        ids[:, len(prompt) :][masked] = model.mask_id
        logits = _logits(model, ids, masked)
        if self.guidance:
            ids[:, : len(prompt)] = model.mask_id
            without = _logits(model, ids, masked)
            logits = without + (1 + self.guidance) * (logits - without)
        return logits.log_softmax(-1)

    def _greedy(
        self, model: DiffusionModel, prompt: list[int], target: list[int]
    ) -> tuple[bool, int]:
        """Find out whether revealing the surest token first, one a forward from all masked, gives
        the target, as in the official code; and the forwards. The first token that differs ends
        it: none is taken back."""
        masks = np.ones((1, len(target)), dtype=bool)
        for step in range(len(target)):
            places = np.flatnonzero(masks[0])
            surest, tokens = self._log_probabilities(model, prompt, target, masks).max(-1)
            first = int(surest.argmax())
            if int(tokens[first]) != target[places[first]]:
                return False, (step + 1) * self._calls
            # The token is the target's own, so the target with fewer masks is what comes next.
            masks[0, places[first]] = False
        return True, len(target) * self._calls


def draw_masks(length: int, size: int, rng: np.random.Generator) -> Masks:
    """Draw a group of masks ``[size, length]``: the number of masked positions of each is uniform
    in 1..length, and together the numbers are spread evenly."""
    masks = np.zeros((size, length), dtype=bool)
    counts = spread_counts(int(rng.integers(length)), size, length)
    for row, count in zip(masks, counts, strict=True):
        row[rng.choice(length, count, replace=False)] = True
    return masks


def spread_counts(start: int, size: int, length: int) -> NDArray[np.int64]:
    """Spread `size` numbers over 1..length: 4 of 1..8 from 2 on are 3 5 7 1."""
    return (start + np.arange(size) * length // size) % length + 1


def _logits(model: DiffusionModel, ids: Tensor, masked: Tensor) -> Tensor:
    """Return fp32 logits ``[M, V]`` of ids ``[N, P + L]`` at the masked of the last L positions."""
    hidden = model.hidden(ids, spans.bidirectional(ids.shape[1]))
    rows, places = masked.nonzero(as_tuple=True)
    first = ids.shape[1] - masked.shape[1] - model.logit_shift  # row that predicts the target's 0
    return model.head(hidden[rows, first + places]).float()
