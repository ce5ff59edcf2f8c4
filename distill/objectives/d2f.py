"""Discrete diffusion forcing (D2F, arXiv 2508.09192, section 3): a student that reads block
by block learns from the same weights read bidirectionally.

A prompt of 2 tokens and a response of 4 in blocks of 2; M is masked, more of them to the right:

    position            0 1 | 2 3 | 4 5
    fed to both         p p | a M | M M
    student's position 2 sees [0, 4), position 4 [0, 6): the end of its own block
    teacher's positions all see [0, 6)
    loss                KL(teacher || student) at 3, 4, 5, each with weight 1 / ratio of its block

That is the official code's loss. The paper's equation 3 is KL(student || teacher) and has no such
weight: `distill_target: reverse`, `weighting: equal`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import model_validator

from d2f import noise, spans
from d2f.checkpoint import folder_of, read_object
from d2f.config import Positive, Ratio, Section, Text
from d2f.contract import Contract
from d2f.errors import InputError
from d2f.models import resolve
from d2f.noise import read_states
from distill.config import BlockSizes, Lora, MaskRatio, Options, TrainConfig
from distill.data.samples import Sample
from distill.objectives import OBJECTIVES
from distill.objectives.base import (
    Batch,
    Objective,
    gathered,
    rows_at_a_time,
    sum_in_parts,
)

if TYPE_CHECKING:
    from torch import Tensor

    from d2f.model import DiffusionModel

# Keys that a named schedule sets: the official code's noise, the paper's, blocks in no order, the
# states of the decoder's pipeline, block diffusion's states.
SCHEDULES: dict[str, dict[str, float]] = {
    "code": {"low": 0.2, "high": 0.7, "monotone_share": 1.0},
    "paper": {"low": 0.3, "high": 0.7, "monotone_share": 1.0},
    "random": {"monotone_share": 1.0},
    "pipeline": {"monotone_share": 0.0},
    "clean_prefix": {"monotone_share": 0.0},
}


class Noise(Section):
    """Mask ratios."""

    schedule: Literal["code", "paper", "random", "pipeline", "clean_prefix"] | None = None
    """Sets low, high and monotone_share by name; clean_prefix: block diffusion's states."""
    states: Text | None = None
    """File of recorded pipeline states (`python -m decode.record_states`)."""
    low: Ratio = 0.2
    """Lower bound of the monotone ratios, at most high."""
    high: Ratio = 0.7
    """Upper bound of the monotone ratios."""
    monotone_share: Ratio = 1.0
    """Samples with monotone ratios; the others follow the pipeline's states."""
    min_ratio: MaskRatio = 0.05
    """Least ratio of clean_prefix and of pipeline states that are drawn."""
    far_weight: Ratio = 1.0
    """Weight of the tokens on the right of the first appended block of a pipeline state."""
    most_active: Positive | None = None
    """Partly masked blocks of a pipeline state; default all."""

    @model_validator(mode="after")
    def _resolved(self) -> Noise:
        for key, value in SCHEDULES.get(self.schedule or "", {}).items():
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(
                    f"schedule {self.schedule} sets {key} to {value}, got {getattr(self, key)}: "
                    "leave one of them out"
                )
            object.__setattr__(self, key, value)
        if self.low > self.high:
            raise ValueError(f"noise.low must not exceed noise.high {self.high}, got {self.low}")
        if self.states is not None and self.monotone_share == 1.0:
            raise ValueError(
                "states are drawn by the samples that monotone_share leaves, got 1.0: "
                "set schedule: pipeline or a lower monotone_share"
            )
        return self


class D2FOptions(Options):
    """Discrete diffusion forcing."""

    prompt_rule, masks_by_ratio, has_teacher = "block", True, True

    block_size: BlockSizes = 16
    """A size, several with equal shares, or sizes with their shares of the samples. Decoders take
    the first of several."""
    distill_target: Literal["soft", "reverse", "hard"] = "soft"
    """KL(teacher || student), as the official code; reverse: KL(student || teacher), as the paper;
    hard: cross-entropy with the clean ids."""
    weighting: Literal["inverse_ratio", "equal"] = "inverse_ratio"
    """A masked token's weight, 1 / ratio of its block as the official code has it, or 1."""
    noise: Noise = Noise()
    """Mask ratios."""
    lora: Lora = Lora()
    """The adapter that is trained."""

    @property
    def best_loss(self) -> str:
        return "cross_entropy" if self.distill_target == "hard" else "kl"

    def contract(self) -> dict[str, object]:
        return super().contract() | {"noise": (self.noise.low, self.noise.high)}


class D2F(Objective):
    """Train a block-causal student: it learns the distribution that the same weights without the
    adapter give bidirectionally on the same noisy input (D2F, section 3)."""

    section = D2FOptions

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        super().__init__(model, config)
        path, sizes = self.options.noise.states, list(self.block_shares)
        self.states = None if path is None else read_states(path)
        if self.states is not None and not set(sizes) <= set(self.states.by_size):
            raise InputError(
                f"{path}: expected states of the block sizes {sizes}, got "
                f"{list(self.states.by_size)}"
            )

    @classmethod
    def check_model(cls, model: DiffusionModel, config: TrainConfig) -> None:
        from d2f.families import FAMILIES

        super().check_model(model, config)
        fitting = [name for name, f in FAMILIES.items() if f.prompt_rule == "bidirectional"]
        if model.family not in fitting:
            raise InputError(
                f"objective d2f needs a teacher that sees everything (families "
                f"{', '.join(fitting)}), got {model.family}"
            )

    @classmethod
    def doubt(cls, config: TrainConfig) -> str | None:
        """Warn of an `init` that was not trained to read both sides, as the teacher does. This
        project's contract says what trained a checkpoint; of a published one its kind counts."""
        from d2f.families import FAMILIES

        if config.init is None:
            return None
        folder = folder_of(resolve(config.init), weights=False)
        contract, why = Contract.load(folder), None
        if contract is None:
            if (folder / "config.json").is_file():
                kind = read_object(folder / "config.json").get("model_type")
                why = "it is autoregressive" if kind in FAMILIES["causal"].model_types else None
        elif contract.objective is None:
            why = "its contract names no objective"
        elif OBJECTIVES[contract.objective].section.prompt_rule == "causal":
            why = f"its contract says objective {contract.objective}"
        return why and (
            f"warning: init {config.init} was never trained to read both sides ({why}), and is the "
            "teacher of objective d2f, read so: train it by objective masked_diffusion first"
        )

    def state(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        settings, size = self.options.noise, self.block_size(sample)
        rng, length, far_weight = self.rng(sample), len(sample.response), settings.far_weight
        end = length  # of the blocks that the decoder would have opened
        if settings.schedule == "clean_prefix":
            # Mask one block a sample. Block diffusion's own code reads every block of a sample at
            # once, beside its clean copy. A step here learns from fewer tokens, but each counts as
            # under the other schedules: 1 / ratio, over the tokens that the step reads.
            ratios, end = noise.clean_prefix_ratios(length, size, settings.min_ratio, rng)
            far_weight = 0.0
        elif rng.random() < settings.monotone_share:
            draw = noise.random_ratios if settings.schedule == "random" else noise.monotone_ratios
            ratios = draw(length, size, settings.low, settings.high, rng)
        elif self.states is not None:
            ratios, end = self.states.draw(length, size, rng)
        else:
            low, most = settings.min_ratio, settings.most_active
            ratios = noise.pipeline_ratios(length, size, low, 1.0, rng, most)
            fresh = int(np.argmax(np.append(ratios, 1.0) == 1.0))  # where appended blocks begin
            end = fresh + size
        weight = np.ones(length)
        if self.options.weighting == "inverse_ratio":
            weight = 1 / np.where(ratios > 0, ratios, 1.0)
        return ratios, np.where(np.arange(length) >= end, far_weight, weight)

    def normalizer(self, sample: Sample, read: np.ndarray) -> float:
        # Over masked tokens, as the official code takes its mean.
        return float(self.importance(sample)[read].sum())

    def sample_spans(self, sample: Sample) -> Tensor:
        return spans.block_causal(len(sample), len(sample.prompt), self.block_size(sample))

    def forward(self, batch: Batch) -> Tensor:
        if self.options.distill_target == "hard":
            return super().forward(batch)
        from triton_kernels.masked_kl import masked_linear_kl

        teacher = self.read_teacher(batch)
        student = self.read(batch, batch.spans)
        # Teacher and student share the frozen head: one matrix, which needs no gradient.
        head = gathered(self.model.backbone.lm_head.weight)
        if self.options.distill_target == "reverse":
            return linear_reverse_kl(student, teacher, head, batch.weight)
        return masked_linear_kl(student, teacher, head, batch.weight)


def linear_reverse_kl(
    student_hidden: Tensor, teacher_hidden: Tensor, head: Tensor, weight: Tensor
) -> Tensor:
    """Sum over rows of weight x KL(student || teacher), D2F's equation 3 (arXiv 2508.09192), in
    fp32: with s and t the softmax of student and teacher, sum_v s_v (log s_v - log t_v).

    student_hidden, teacher_hidden: ``[N, C]``, the latter without gradient. head: ``[V, C]``,
    frozen. weight: ``[N]``. The other direction is `triton_kernels.masked_kl`.
    """
    import torch

    def of_part(student: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
        log_s, log_t = (
            torch.nn.functional.linear(hidden, head).log_softmax(-1, dtype=torch.float32)  # [n, V]
            for hidden in (student, teacher)
        )
        return ((log_s.exp() * (log_s - log_t)).sum(-1) * weight).sum()

    rows = max(1, rows_at_a_time(len(head)) // 2)  # two models' logits share the bound
    return sum_in_parts(of_part, (student_hidden, teacher_hidden.detach(), weight), rows)
