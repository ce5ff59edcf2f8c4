"""The typed configuration of a training run, from YAML with command-line overrides.

Frozen; an unknown key or a wrong type is an error before any work; the resolved configuration is
saved with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from d2f.configuration import Section, Switch, check, override, read_mapping
from d2f.shipped import TRAINING, find_config
from d2f.yaml_core import dump
from distill.data.settings import Data, Positive, Ratio
from distill.unread import refuse_unread

Share = Annotated[float, Field(gt=0)]
# One size, several with equal shares, or sizes with their shares of the samples.
BlockSizes = (
    Positive
    | Annotated[tuple[Positive, ...], Field(min_length=1)]
    | Annotated[dict[Positive, Share], Field(min_length=1)]
)


class ModelShape(Section):
    """A model to build from scratch with random weights."""

    hidden_size: Positive = 256
    intermediate_size: Positive = 768
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 4
    context_length: Positive = 512


# What a named schedule of d2f sets: the official code's noise, the paper's, blocks in no order, the
# states of the decoder's pipeline.
SCHEDULES: dict[str, dict[str, float]] = {
    "code": {"low": 0.2, "high": 0.7, "monotone_share": 1.0},
    "paper": {"low": 0.3, "high": 0.7, "monotone_share": 1.0},
    "random": {"monotone_share": 1.0},
    "pipeline": {"monotone_share": 0.0},
}


class Noise(Section):
    """Mask ratios of the objectives masked_diffusion and d2f."""

    schedule: Literal["code", "paper", "random", "pipeline"] | None = None  # d2f: keys by name
    states: str | None = None  # d2f: file of recorded pipeline states (python -m decode.states)
    low: Ratio = 0.2  # d2f: bounds of the monotone ratios
    high: Ratio = 0.7
    monotone_share: Ratio = 1.0  # d2f: the other samples follow the pipeline's states
    uniform_share: Ratio = 1.0  # masked_diffusion: the others follow block-wise decoding
    min_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 0.05
    max_ratio: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0  # of the uniform samples
    block_sizes: tuple[Positive, ...] = (8, 16, 32)  # of block-wise decoding
    causal_share: Ratio = 0.0  # masked_diffusion: samples read as next-token prediction
    far_weight: Ratio = 1.0  # of the tokens on the right of the block that is being decoded; d2f:
    # on the right of the first appended block of a pipeline state
    most_active: Positive | None = (
        None  # d2f: partly masked blocks of a pipeline state; default all
    )

    @model_validator(mode="after")
    def _resolved(self) -> Noise:
        for key, value in SCHEDULES.get(self.schedule or "", {}).items():
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(
                    f"schedule {self.schedule} sets {key} to {value}, got {getattr(self, key)}: "
                    "leave one of them out"
                )
            object.__setattr__(self, key, value)
        if self.states is not None and self.monotone_share == 1.0:
            raise ValueError(
                "states are drawn by the samples that monotone_share leaves, got 1.0: "
                "set schedule: pipeline or a lower monotone_share"
            )
        return self


Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Lora(Section):
    r: Positive = 32
    alpha: Positive = 32
    dropout: Ratio = 0.1
    # Linear layers that are adapted, by transformers' names.
    targets: Annotated[tuple[Module, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip

    @model_validator(mode="after")
    def _distinct(self) -> Lora:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets must be distinct, got {list(self.targets)}")
        return self


class WinoPlus(Section):
    """The objective wino_plus (`distill.wino_plus`), on the rollouts in data.file."""

    tau1: Ratio = 0.6  # confidence from which a wrong prediction of a later token is deferred
    tau2: Ratio = 0.9  # confidence below which a right prediction of this step is sharpened
    defer_weight: Annotated[float, Field(ge=0)] = 1.0  # 0 leaves the term out
    sharpen_weight: Annotated[float, Field(ge=0)] = 0.1  # lambda; 0 leaves the term out
    scope: Literal["all", "block"] = "all"  # later tokens that may be deferred; the code: block
    tail: Switch = True  # whether tokens after the first end token are trained
    trajectory: Literal["recorded", "random"] = "recorded"  # random: the paper's ablation
    mask: Literal["bidirectional", "block_causal"] = "bidirectional"  # of the trained model
    kl_weight: Annotated[float, Field(ge=0)] = 0.0  # beta, of KL(teacher || student)

    @model_validator(mode="after")
    def _ordered(self) -> WinoPlus:
        if self.tau1 >= self.tau2:
            raise ValueError(f"tau1 must be below tau2, got {self.tau1} and {self.tau2}")
        return self


class Wedlm(Section):
    """The objective wedlm."""

    weights: Literal["paper", "code"] = "paper"  # 1 / gamma, or normalised by their sum
    ar_weight: Annotated[float, Field(ge=0)] = 1.0  # of the next-token loss
    adapter: Switch = False  # train a LoRA (section lora) instead of all weights


class Evaluation(Section):
    """Held-out problems that are decoded every `eval_every` steps, where that is given."""

    tasks: tuple[str, ...] | None = None  # default: those of data.tasks
    problems: Positive = 32  # of each task
    split: Literal["tuning", "heldout"] = "tuning"
    batch_size: Positive = 32
    decoder: str | None = None  # default: the one that suits what is trained
    # Of the decoder, by the names of its command-line flags with underscores.
    options: dict[str, Any] = Field(default_factory=dict)


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[int, Field(ge=0)] = 100
    schedule: Literal["constant", "cosine"] = "cosine"
    final_lr_share: Ratio = 0.05  # of lr, where the schedule cosine ends
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    clip: Annotated[float, Field(gt=0)] = 1.0


class TrainConfig(Section):
    """One training run."""

    objective: Literal["masked_diffusion", "next_token", "d2f", "wino_plus", "wedlm"]
    output: str
    steps: Positive
    data: Data
    seed: int = 0
    family: str | None = None  # of the result; default: that of init
    init: str | None = None  # checkpoint to start from
    init_adapter: str | None = None  # adapter of init to train on; default: a fresh one
    model: ModelShape | None = None  # or the shape to start from scratch
    tokenizer: str | None = None  # of a model from scratch, folder or hub name; default: the tasks'
    # Of d2f, wedlm and wino_plus (that of its rollouts); of several, decoders take the first.
    block_size: BlockSizes = 16
    distill_target: Literal["soft", "hard"] = "soft"  # teacher's distribution, or the clean ids
    optimizer: Optimizer = Optimizer()
    noise: Noise = Noise()
    wino_plus: WinoPlus = WinoPlus()
    lora: Lora = Lora()
    wedlm: Wedlm = Wedlm()
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    base_dtype: Literal["float32", "bfloat16"] = "float32"  # of frozen weights
    quantize: Literal["none", "4bit"] = "none"  # of frozen weights (QLoRA)
    gradient_checkpointing: Switch = False  # compute each layer again in the backward pass
    gradient_accumulation: Positive = 1  # parts that a process feeds its rows of a step in
    # Attention of training: auto measures on a GPU which is fastest, and is sdpa on a CPU.
    attention: Literal["auto", "kernel", "sdpa", "flex"] = "auto"
    save_every: Positive = 200
    keep: Positive = 2  # newest checkpoints kept
    eval_every: Positive | None = None  # steps between evaluations; the last step is one
    evaluation: Evaluation = Evaluation()
    export_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    export_official: Switch = False  # also in the format that the family's own code reads
    tracker: Literal["none", "wandb", "tensorboard"] = "wandb"
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"  # of the tracker wandb
    log_every: Positive = 10

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.init is None) == (self.model is None):
            raise ValueError("exactly one of init and model must be given")
        if self.trains_adapter and self.init is None:
            raise ValueError(
                f"objective {self.objective} needs init: the model that the adapter is for"
            )
        if self.init_adapter is not None and not self.trains_adapter:
            raise ValueError(
                f"objective {self.objective} trains no adapter: leave out init_adapter"
            )
        if self.objective == "wino_plus" and len(self.block_shares) > 1:
            raise ValueError("objective wino_plus takes one block_size, that of its rollouts")
        if self.objective == "wino_plus" and self.data.file is None:
            raise ValueError("objective wino_plus needs data.file: a file of distill.rollouts")
        if not self.trains_adapter and (self.quantize, self.base_dtype) != ("none", "float32"):
            raise ValueError(
                f"quantize and base_dtype are of frozen weights: objective {self.objective} trains "
                "them all, in float32"
            )
        if self.block_causal and max(self.block_shares) > self.data.row_length:
            raise ValueError(
                f"block_size must not exceed data.row_length {self.data.row_length}, "
                f"got {max(self.block_shares)}"
            )
        if self.model is not None and self.family is None:
            raise ValueError("a model from scratch needs a family")
        if self.eval_every is not None and not (self.evaluation.tasks or self.data.tasks):
            raise ValueError("eval_every needs evaluation.tasks where data.tasks names none")
        if self.noise.low > self.noise.high:
            raise ValueError("noise.low must not exceed noise.high")
        if self.noise.min_ratio > self.noise.max_ratio:
            raise ValueError("noise.min_ratio must not exceed noise.max_ratio")
        refuse_unread(self)
        return self

    @property
    def trains_adapter(self) -> bool:
        """Whether the weights of init stay as they are and a LoRA on them is trained."""
        adapted = self.objective == "wedlm" and self.wedlm.adapter
        return self.objective in ("d2f", "wino_plus") or adapted

    @property
    def block_causal(self) -> bool:
        """Whether the result is a D2F student."""
        wino_plus = self.objective == "wino_plus" and self.wino_plus.mask == "block_causal"
        return self.objective == "d2f" or wino_plus

    @property
    def block_shares(self) -> dict[int, float]:
        """Share of the samples that are trained with each block size, in the given order."""
        sizes = self.block_size
        if isinstance(sizes, int):
            return {sizes: 1.0}
        if not isinstance(sizes, dict):
            return {size: sizes.count(size) / len(sizes) for size in sizes}
        return {size: share / sum(sizes.values()) for size, share in sizes.items()}

    def save(self, path: Path) -> None:
        path.write_text(dump(self.model_dump(mode="json")), encoding="utf-8")


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a YAML file, or of that name among those that ship with the package,
    with overrides ``--key value`` (dots into sections).

    Raises InputError that names each key, what was expected and what came.
    """
    values = read_mapping(find_config(path, *TRAINING))
    override(values, overrides)
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], source: str) -> TrainConfig:
    """A checked configuration. Raises InputError."""
    return check(TrainConfig, values, source)
