"""Masked diffusion (LLaDA, arXiv 2502.09992): each token hidden with a probability, the model reads
both sides and predicts what is hidden.

An answer of six tokens, three draws of it (M: masked, c: read causally):

    one ratio, 0.5         a M c M M f     weight 1 / 0.5 on each M; with `noise.cart_p` by how
                                             near each is to what is revealed (Dream)
    block-wise, blocks     a b | M d | M M   left of the block revealed, the block at its ratio r,
      of 2, the second                       right of it all masked; weight 3 blocks / r in the
                                             block, `noise.far_weight` on its right
    causal_share           a b c d e f     nothing hidden, each row predicts the next token
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field, model_validator

from d2f import noise, spans
from d2f.config import Ratio, Section, Tokens
from d2f.errors import InputError
from distill.config import MaskRatio, Options, TrainConfig
from distill.data.samples import Sample
from distill.objectives.base import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from d2f.model import DiffusionModel


class Noise(Section):
    """Mask ratios."""

    uniform_share: Ratio = 1.0
    """Samples with one ratio; the others follow block-wise decoding."""
    min_ratio: MaskRatio = 0.05
    """Least ratio of the samples, at most max_ratio."""
    max_ratio: MaskRatio = 1.0
    """Greatest ratio of the uniform samples."""
    cart_p: MaskRatio | None = None
    """Dream's weight by context instead of 1 / ratio: the share of a token's weight that the place
    next to it decides. Dream's code takes 0.1."""
    block_sizes: Annotated[tuple[Tokens, ...], Field(min_length=1)] = (8, 16, 32)
    """Block sizes of block-wise decoding."""
    causal_share: Ratio = 0.0
    """Samples read as next-token prediction."""
    far_weight: Ratio = 1.0
    """Weight of the tokens on the right of the block that is being decoded."""

    @model_validator(mode="after")
    def _consistent(self) -> Noise:
        if self.min_ratio > self.max_ratio:
            raise ValueError(
                f"noise.min_ratio must not exceed noise.max_ratio {self.max_ratio}, "
                f"got {self.min_ratio}"
            )
        if self.uniform_share < 1 and self.cart_p is not None:
            raise ValueError(
                "cart_p weighs samples with one ratio, and uniform_share leaves "
                f"{1 - self.uniform_share:g} to block-wise decoding: leave one of them out"
            )
        return self


class MaskedDiffusionOptions(Options):
    """Masked diffusion."""

    prompt_rule, masks_by_ratio = "bidirectional", True

    noise: Noise = Noise()
    """Mask ratios."""


class MaskedDiffusion(Objective):
    """Train by LLaDA's objective: cross-entropy on masked tokens, weighted by 1 / ratio and divided
    by the number of all tokens.

    A share of the samples follows the states of block-wise decoding instead of one ratio: the
    answer's blocks on the left revealed, one block partly masked, all on its right masked. Its
    block counts for all of them (weight: their number / ratio), what is on its right little.
    Another share stays next-token prediction under causal spans, so that a model that starts from
    autoregressive weights does not forget what they can do; for shifted families only.
    """

    section = MaskedDiffusionOptions

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        super().check_model(model, config)
        assert isinstance(config.objective, MaskedDiffusionOptions)
        if config.objective.noise.causal_share > 0 and model.logit_shift != 1:
            raise InputError(
                "noise.causal_share needs a family whose row p-1 predicts position p, "
                f"got {model.family}"
            )

    def is_causal(self, sample: Sample) -> bool:
        """Tell whether a sample is read as next-token prediction: nothing hidden, causal spans."""
        if self.mask_ratio is not None:
            return False
        draw = noise.sample_rng(self.config.seed, sample.index, noise.CAUSAL).random()
        return bool(draw < self.options.noise.causal_share)

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        if self.is_causal(sample):
            return read_causally(sample)
        masked, weight = super().draw(sample)
        p = self.options.noise.cart_p
        if p is not None and self.mask_ratio is None:
            by_context = noise.context_weights(masked, len(sample.prompt), p)
            weight = by_context * self.importance(sample)
        return masked, weight

    def sample_spans(self, sample: Sample) -> Tensor:
        causal = self.is_causal(sample)
        return spans.causal(len(sample)) if causal else spans.bidirectional(len(sample))

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        settings, length, rng = self.options.noise, len(sample.response), self.rng(sample)
        # Low discrepancy: consecutive samples, and so the samples of a step, cover the ratios
        # evenly.
        even = noise.even_draw(self.config.seed, sample.index)
        if rng.random() < settings.uniform_share:
            ratio = settings.min_ratio + (settings.max_ratio - settings.min_ratio) * even
            return noise.uniform_ratios(length, ratio), np.full(length, 1 / ratio)
        ratio = settings.min_ratio + (1 - settings.min_ratio) * even
        size = int(rng.choice(settings.block_sizes))
        # Take blocks of the answer alone: the tail of end tokens is never the current block.
        blocks = -(-sample.answer // size)
        start = size * int(rng.integers(blocks))
        ratios = noise.decoding_ratios(length, start, start + size, ratio)
        far = np.arange(length) >= start + size
        return ratios, np.where(far, settings.far_weight, blocks / ratio)


def read_causally(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """Draw nothing: no token is hidden, and the answer's tokens are read (`Objective.draw`)."""
    place = np.arange(len(sample.response))
    return place < 0, (place < sample.answer).astype(float)
