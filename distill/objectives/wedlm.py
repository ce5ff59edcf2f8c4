"""WeDLM's training (arXiv 2512.22737, section 3): masks recovered under a causal mask.

A sample is fed twice, ``[x_0 | x_t]``, with the same positions. x_0 is clean and plain causal. In
x_t, in each block (counted from position 0, the prompt in them), a share gamma ~ U(0, 1) of the
response tokens is masked and the observed tokens are moved before the masked ones, each with the
position it has in the text. A row of x_t sees the clean blocks before its own, and its own block up
to itself: so a masked token sees all that is observed in its block, as in streaming decoding. Its
own row predicts it, without a shift; the rows of x_0 predict the next token, as in any causal
model. A prompt p q and a response a b c d in blocks of 3, of which b and d are masked (M):

    row       0 1 2   3 4 5 | 6 7 8   9 10 11
    fed       p q a   b c d | p q a   c  M  M    in the last block, c is moved before the masks
    position  0 1 2   3 4 5 | 0 1 2   4  3  5
    row 10 sees rows [0, 3) and [9, 11), and predicts b; row 11 [0, 3) and [9, 12), and d
    row 4 sees rows [0, 5), and predicts d; rows 1 to 3 predict a, b and c in the same way

With `objective.attention: bidirectional`, the paper's ablation, rows 9 to 11 all see [9, 12).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

import numpy as np

from d2f import noise, spans
from d2f.config import Switch, Weight
from d2f.errors import InputError
from distill.config import BlockSizes, Lora, Options, TrainConfig
from distill.data.samples import Sample
from distill.objectives.base import Fed, Objective

if TYPE_CHECKING:
    from torch import Tensor

    from d2f.model import DiffusionModel


class WeDLMOptions(Options):
    """WeDLM."""

    prompt_rule, masks_by_ratio = "causal", True

    block_size: BlockSizes = 16
    """A size, several with equal shares, or sizes with their shares of the samples. Decoders take
    the first of several."""
    weights: Literal["paper", "code"] = "paper"
    """1 / gamma, or as the official code normalised by their sum."""
    ar_weight: Weight = 1.0
    """Weight of the next-token loss."""
    attention: Literal["causal", "bidirectional"] = "causal"
    """Attention among a block's noisy rows; bidirectional is the paper's ablation, decoded with
    refill block and window_attention bidirectional."""
    adapter: Switch = False
    """Train a LoRA instead of all weights."""
    lora: Lora = Lora()
    """The adapter, where one is trained."""

    @property
    def trained_lora(self) -> Lora | None:
        return self.lora if self.adapter else None


class WeDLM(Objective):
    """Train by (masked loss + ar_weight x next-token loss) / (1 + ar_weight).

    Masked loss: cross-entropy weighted by 1 / gamma of the block, divided by the number of response
    tokens (weights ``paper``) or by the sum of the weights (``code``; its eps of 1e-8 is left out,
    as a block with a mask has gamma >= 1 / (2 x block size)). Next-token loss: the mean over the
    response. In all of them end tokens after the first count `data.tail_weight`.
    """

    section, copies = WeDLMOptions, 2

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        super().check_model(model, config)
        if model.contract.prompt_rule != "causal":
            raise InputError(f"objective wedlm trains the family wedlm, got {model.family}")

    def for_held_out(self, ratio: float | None, row_length: int) -> Self:
        changed = super().for_held_out(ratio, row_length)
        changed.options = self.options.model_copy(update={"ar_weight": 0.0})  # masked tokens alone
        return changed

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        if self.mask_ratio is not None:
            return super().draw(sample)
        size, prompt = self.block_size(sample), len(sample.prompt)
        gammas = self.rng(sample).random(-(-len(sample) // size))
        maskable = np.arange(len(sample)) >= prompt
        rng = noise.sample_rng(self.config.seed, sample.index, noise.MASK)
        masked = noise.draw_counts(maskable, size, gammas, rng)[prompt:]
        # The drawn ratio, not the one that rounding to whole tokens gives, as in the official code.
        gamma = np.repeat(gammas, size)[prompt : len(sample)]
        return masked, self.importance(sample) / np.where(masked, gamma, 1.0)

    def sample_spans(self, sample: Sample) -> Tensor:
        both = self.options.attention == "bidirectional"
        return spans.wedlm_training(len(sample), self.block_size(sample), bidirectional=both)

    def fed(self, sample: Sample) -> Fed:
        length, prompt = len(sample), len(sample.prompt)
        masked, weight = self.draw(sample)
        clean = np.array(sample.prompt + sample.response)
        hidden = np.arange(length) >= prompt
        hidden[prompt:] = masked
        # Within each block, so that a causal row of x_t sees all that is observed in its block.
        order = noise.observed_first(hidden, self.block_size(sample))
        noisy = np.where(hidden, self.mask_id or 0, clean)
        masks = np.flatnonzero(hidden[order])
        recovered = order[masks]
        first = max(prompt, 1) if self.options.ar_weight else length  # nothing predicts 0
        following = np.arange(first, length)
        weights = np.zeros((len(masks) + len(following), 2))
        # Column 0 is the masked loss, column 1 the next-token loss.
        weights[: len(masks), 0] = weight[recovered - prompt]
        weights[len(masks) :, 1] = self.importance(sample)[following - prompt]
        total = weights.sum(0)
        if self.options.weights == "paper":
            # By response tokens; the official code divides by the weights themselves.
            total[0] = self.importance(sample).sum()
        return Fed(
            ids=np.concatenate((clean, noisy[order])),
            positions=np.concatenate((np.arange(length), order)),
            # Mask rows are read in x_t, where each predicts its own token; next-token rows in x_0.
            rows=np.concatenate((length + masks, following - 1)),
            targets=clean[np.concatenate((recovered, following))],
            weight=weights,
            total=total,
        )

    @property
    def shares(self) -> np.ndarray:
        ar = self.options.ar_weight
        return np.array([1.0, ar]) / (1 + ar)
