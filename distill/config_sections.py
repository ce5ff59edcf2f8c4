"""The sections of a training run's configuration, but for its data (`distill.data.data_config`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from d2f.configuration import Section, Switch
from d2f.errors import InputError
from d2f.quantities import Positive, Problems, Ratio, Text, Tokens, Weight
from d2f.tasks import Task, find_tasks

Heads = Annotated[int, Field(ge=1, le=1024)]
MaskRatio = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelShape(Section):
    """A model to build from scratch with random weights."""

    hidden_size: Annotated[int, Field(ge=1, le=2**16)] = 256
    """A multiple of twice the heads (RoPE turns pairs)."""
    intermediate_size: Annotated[int, Field(ge=1, le=2**18)] = 768
    """Width of the MLP."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 4
    """Decoder layers."""
    heads: Heads = 4
    """Query heads, a multiple of kv_heads."""
    kv_heads: Heads = 4
    """Key and value heads."""
    context_length: Tokens = 512
    """Positions that the model is made for."""

    @model_validator(mode="after")
    def _divisible(self) -> ModelShape:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size must be a multiple of 2 x heads {self.heads}, got {self.hidden_size}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads must be a multiple of kv_heads {self.kv_heads}, got {self.heads}"
            )
        return self


# What a named schedule of d2f sets: the official code's noise, the paper's, blocks in no order, the
# states of the decoder's pipeline, block diffusion's states.
SCHEDULES: dict[str, dict[str, float]] = {
    "code": {"low": 0.2, "high": 0.7, "monotone_share": 1.0},
    "paper": {"low": 0.3, "high": 0.7, "monotone_share": 1.0},
    "random": {"monotone_share": 1.0},
    "pipeline": {"monotone_share": 0.0},
    "clean_prefix": {"monotone_share": 0.0},
}


class Noise(Section):
    """Mask ratios of the objectives masked_diffusion and d2f."""

    schedule: Literal["code", "paper", "random", "pipeline", "clean_prefix"] | None = None
    """d2f: sets low, high and monotone_share by name; clean_prefix: block diffusion's states."""
    states: Text | None = None
    """d2f: file of recorded pipeline states (`python -m decode.record_states`)."""
    low: Ratio = 0.2
    """d2f: lower bound of the monotone ratios, at most high."""
    high: Ratio = 0.7
    """d2f: upper bound of the monotone ratios."""
    monotone_share: Ratio = 1.0
    """d2f: samples with monotone ratios; the others follow the pipeline's states."""
    uniform_share: Ratio = 1.0
    """masked_diffusion: samples with one ratio; the others follow block-wise decoding."""
    min_ratio: MaskRatio = 0.05
    """masked_diffusion: least ratio of the uniform samples, at most max_ratio."""
    max_ratio: MaskRatio = 1.0
    """masked_diffusion: greatest ratio of the uniform samples."""
    cart_p: MaskRatio | None = None
    """masked_diffusion: Dream's weight by context instead of 1 / ratio: the share of a token's
    weight that the place next to it decides. Dream's code takes 0.1."""
    block_sizes: Annotated[tuple[Tokens, ...], Field(min_length=1)] = (8, 16, 32)
    """masked_diffusion: block sizes of block-wise decoding."""
    causal_share: Ratio = 0.0
    """masked_diffusion: samples read as next-token prediction."""
    far_weight: Ratio = 1.0
    """Weight of the tokens on the right of the block that is being decoded; d2f: on the right of
    the first appended block of a pipeline state."""
    most_active: Positive | None = None
    """d2f: partly masked blocks of a pipeline state; default all."""

    @model_validator(mode="after")
    def _resolved(self) -> Noise:
        for key, value in SCHEDULES.get(self.schedule or "", {}).items():
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(
                    f"schedule {self.schedule} sets {key} to {value}, got {getattr(self, key)}: "
                    "leave one of them out"
                )
            object.__setattr__(self, key, value)
        if self.cart_p is not None and self.uniform_share < 1.0:
            raise ValueError(
                "cart_p weighs samples with one ratio, and uniform_share leaves "
                f"{1 - self.uniform_share:g} to block-wise decoding: leave one of them out"
            )
        if self.states is not None and self.monotone_share == 1.0:
            raise ValueError(
                "states are drawn by the samples that monotone_share leaves, got 1.0: "
                "set schedule: pipeline or a lower monotone_share"
            )
        return self


Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    """The adapter that d2f, wino_plus and, where asked for, wedlm train."""

    r: Annotated[int, Field(ge=1, le=8192)] = 32
    """Rank."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """The update is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Of the adapter's input."""
    targets: Annotated[tuple[Module, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip
    """Linear layers that are adapted, by transformers' names. With init_adapter the
    default stands for its own; others are its own and further ones, which begin at no change."""

    @model_validator(mode="after")
    def _distinct(self) -> Lora:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets must be distinct, got {list(self.targets)}")
        return self


class WinoPlus(Section):
    """The objective wino_plus (`distill.objectives.wino_plus`), on the rollouts in data.file."""

    tau1: Ratio = 0.6
    """Confidence from which a wrong prediction of a later token is deferred; below tau2."""
    tau2: Ratio = 0.9
    """Confidence below which a right prediction of this step is sharpened."""
    defer_weight: Weight = 1.0
    """Weight of deferring; 0 leaves the term out."""
    sharpen_weight: Weight = 0.1
    """Weight of sharpening (the paper's lambda); 0 leaves the term out."""
    scope: Literal["all", "block"] = "all"
    """Later tokens that may be deferred: all, or as the official code those of the block."""
    tail: Switch = True
    """Whether tokens after the first end token are trained."""
    trajectory: Literal["recorded", "random"] = "recorded"
    """random: the paper's ablation."""
    mask: Literal["bidirectional", "block_causal"] = "bidirectional"
    """Of the trained model."""
    kl_weight: Weight = 0.0
    """Weight of KL(teacher || student) (the paper's beta)."""

    @model_validator(mode="after")
    def _ordered(self) -> WinoPlus:
        if self.tau1 >= self.tau2:
            raise ValueError(f"tau1 must be below tau2, got {self.tau1} and {self.tau2}")
        return self


class Wedlm(Section):
    """The objective wedlm."""

    weights: Literal["paper", "code"] = "paper"
    """1 / gamma, or as the official code normalised by their sum."""
    ar_weight: Weight = 1.0
    """Weight of the next-token loss."""
    attention: Literal["causal", "bidirectional"] = "causal"
    """Of a block's noisy rows among themselves; bidirectional is the paper's ablation, decoded with
    refill block and window_attention bidirectional."""
    adapter: Switch = False
    """Train a LoRA (section lora) instead of all weights."""


class Evaluation(Section):
    """What is measured every `eval_every` steps: held-out problems that are decoded (`tasks`), a
    held-out loss (`loss_rows`, `loss_file`), or both."""

    tasks: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Generated ones, or task files; default: those of data.tasks."""
    allow_code_execution: Switch = False
    """Let the judge python run what the model writes, on this machine."""
    problems: Problems = 32
    """Problems of each task."""
    split: Literal["tuning", "heldout"] = "tuning"
    """Which problems, of a held-out loss too."""
    batch_size: Annotated[int, Field(ge=1, le=10**5)] = 32
    """Most requests, or samples of a held-out loss, in a forward."""
    decoder: Text | None = None
    """Default: the one that suits what is trained."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Of the decoder, by the names of its command-line flags with underscores."""
    loss_rows: Problems | None = None
    """Rows of a held-out loss: drawn by the seed from data.file or data.dataset and never trained
    on, whatever eval_every is; of loss_file at most so many; of data.tasks, problems of `split`.
    Default: all of loss_file, else none."""
    loss_file: Text | None = None
    """A file of its own for the held-out loss, read as data.file."""
    loss_ratios: Annotated[tuple[MaskRatio, ...], Field(min_length=1, max_length=100)] = (
        0.1, 0.3, 0.5, 0.7, 0.9,
    )  # fmt: skip
    """Mask ratios that the held-out loss is taken at."""
    best_by: Literal["accuracy", "kl", "cross_entropy"] | None = None
    """What the best checkpoint has most of (accuracy) or least of. Default: accuracy where tasks
    are decoded, else kl of d2f that learns by it, else cross_entropy."""

    @property
    def wants_loss(self) -> bool:
        """Whether a held-out loss is asked for."""
        return self.loss_rows is not None or self.loss_file is not None

    @model_validator(mode="after")
    def _known(self) -> Evaluation:
        if len(set(self.loss_ratios)) < len(self.loss_ratios):
            raise ValueError(f"loss_ratios must be distinct, got {list(self.loss_ratios)}")
        try:
            self.chosen(())
        except InputError as error:
            raise ValueError(f"tasks: {error}") from error
        return self

    def chosen(self, otherwise: Sequence[str]) -> tuple[Task, ...]:
        """The tasks themselves. otherwise: where none are named. Raises InputError."""
        names = self.tasks or otherwise
        if not names:
            return ()
        return find_tasks(names, allow_code_execution=self.allow_code_execution)


class Optimizer(Section):
    """AdamW and its rate."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-3
    """Greatest learning rate."""
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 100
    """Steps in which the rate rises to lr."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Of the rate after the warm-up."""
    final_lr_share: Ratio = 0.05
    """cosine: share of lr at the end."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the two running means."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.05
    """Decoupled, times the rate."""
    clip: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Norm that gradients are scaled down to."""
