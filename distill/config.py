"""The typed configuration of a training run, from YAML with command-line overrides.

Frozen; an unknown key or a wrong type is an error before any work; the resolved configuration is
saved with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from d2f.configuration import Section, check, override, read_mapping
from distill.data.settings import Data, Positive, Ratio


class ModelShape(Section):
    """A model to build from scratch with random weights."""

    hidden_size: Positive = 256
    intermediate_size: Positive = 768
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 4
    context_length: Positive = 512


class Noise(Section):
    """Mask ratios of the objectives masked_diffusion and d2f."""

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


class Lora(Section):
    r: Positive = 32
    alpha: Positive = 32
    dropout: Ratio = 0.1


class WinoPlus(Section):
    """The objective wino_plus (`distill.wino_plus`), on the rollouts in data.file."""

    tau1: Ratio = 0.6  # confidence from which a wrong prediction of a later token is deferred
    tau2: Ratio = 0.9  # confidence below which a right prediction of this step is sharpened
    defer_weight: Annotated[float, Field(ge=0)] = 1.0  # 0 leaves the term out
    sharpen_weight: Annotated[float, Field(ge=0)] = 0.1  # lambda; 0 leaves the term out
    scope: Literal["all", "block"] = "all"  # later tokens that may be deferred; the code: block
    tail: bool = True  # whether tokens after the first end token are trained
    trajectory: Literal["recorded", "random"] = "recorded"  # random: the paper's ablation
    mask: Literal["bidirectional", "block_causal"] = "bidirectional"  # of the trained model
    kl_weight: Annotated[float, Field(ge=0)] = 0.0  # beta, of KL(teacher || student)

    @model_validator(mode="after")
    def _ordered(self) -> WinoPlus:
        if self.tau1 >= self.tau2:
            raise ValueError(f"tau1 must be below tau2, got {self.tau1} and {self.tau2}")
        return self


class Optimizer(Section):
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[int, Field(ge=0)] = 100
    schedule: Literal["constant", "cosine"] = "cosine"
    final_lr_share: Ratio = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    clip: Annotated[float, Field(gt=0)] = 1.0


class TrainConfig(Section):
    """One training run."""

    objective: Literal["masked_diffusion", "next_token", "d2f", "wino_plus"]
    output: str
    steps: Positive
    data: Data
    seed: int = 0
    family: str | None = None  # of the result; default: that of init
    init: str | None = None  # checkpoint to start from
    init_adapter: str | None = None  # adapter of init to train on; default: a fresh one
    model: ModelShape | None = None  # or the shape to start from scratch
    tokenizer: str | None = None  # folder; default: that of init, or the tasks' own
    block_size: Positive = 16  # of D2F training
    distill_target: Literal["soft", "hard"] = "soft"  # teacher's distribution, or the clean ids
    optimizer: Optimizer = Optimizer()
    noise: Noise = Noise()
    wino_plus: WinoPlus = WinoPlus()
    lora: Lora = Lora()
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    # Attention of training: auto measures on a GPU which is fastest, and is sdpa on a CPU.
    attention: Literal["auto", "kernel", "sdpa", "flex"] = "auto"
    save_every: Positive = 200
    keep: Positive = 2  # newest checkpoints kept
    export_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    tracker: Literal["none", "wandb", "tensorboard"] = "wandb"
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    log_every: Positive = 10

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if (self.init is None) == (self.model is None):
            raise ValueError("exactly one of init and model must be given")
        if self.trains_adapter and self.init is None:
            raise ValueError(
                f"objective {self.objective} needs init: the model that is teacher and base"
            )
        if self.init_adapter is not None and not self.trains_adapter:
            raise ValueError(
                f"objective {self.objective} trains no adapter: leave out init_adapter"
            )
        if self.objective == "wino_plus" and self.data.file is None:
            raise ValueError("objective wino_plus needs data.file: a file of distill.rollouts")
        if self.model is not None and self.family is None:
            raise ValueError("a model from scratch needs a family")
        if self.noise.low > self.noise.high:
            raise ValueError("noise.low must not exceed noise.high")
        if self.noise.min_ratio > self.noise.max_ratio:
            raise ValueError("noise.min_ratio must not exceed noise.max_ratio")
        return self

    @property
    def trains_adapter(self) -> bool:
        """Whether the weights of init stay as they are and a LoRA on them is trained."""
        return self.objective in ("d2f", "wino_plus")

    @property
    def block_causal(self) -> bool:
        """Whether the result is a D2F student."""
        wino_plus = self.objective == "wino_plus" and self.wino_plus.mask == "block_causal"
        return self.objective == "d2f" or wino_plus

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False))


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """The configuration in a YAML file, with overrides ``--key value`` (dots into sections).

    Raises InputError that names each key, what was expected and what came.
    """
    values = read_mapping(path)
    override(values, overrides)
    return parse_config(values, str(path))


def parse_config(values: dict[str, Any], source: str) -> TrainConfig:
    """A checked configuration. Raises InputError."""
    return check(TrainConfig, values, source)
