"""Next-token prediction: the autoregressive baseline, and what a diffusion model may start from."""

from __future__ import annotations

import numpy as np

from d2f.errors import InputError
from d2f.model import DiffusionModel
from distill.config import Options, TrainConfig
from distill.data import Sample
from distill.objectives.base import Objective


class NextTokenOptions(Options):
    """Next-token prediction: it reads no keys of its own."""

    prompt_rule, masks, has_tail = "causal", False, False


class NextToken(Objective):
    """Autoregressive cross-entropy on the response and its first end token."""

    section = NextTokenOptions

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        if model.is_diffusion:
            raise InputError(f"objective next_token trains the family causal, got {model.family}")

    def is_causal(self, sample: Sample) -> bool:
        return True

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        return np.ones(len(sample.response)), np.ones(len(sample.response))
