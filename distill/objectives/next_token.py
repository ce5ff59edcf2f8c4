"""Next-token prediction: the autoregressive baseline, and what a diffusion model may start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from d2f import spans
from d2f.errors import InputError
from distill.config import Options, TrainConfig
from distill.data.samples import Sample
from distill.objectives.base import Objective
from distill.objectives.masked_diffusion import read_causally

if TYPE_CHECKING:
    from torch import Tensor

    from d2f.model import DiffusionModel


class NextTokenOptions(Options):
    """Next-token prediction: it reads no keys of its own."""

    prompt_rule, has_tail = "causal", False


class NextToken(Objective):
    """Train by cross-entropy of the response and its first end token, read causally."""

    section = NextTokenOptions

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        if model.is_diffusion:
            raise InputError(f"objective next_token trains the family causal, got {model.family}")

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        return read_causally(sample)

    def sample_spans(self, sample: Sample) -> Tensor:
        return spans.causal(len(sample))
