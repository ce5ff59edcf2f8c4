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

Positive = Annotated[int, Field(gt=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelShape(Section):
    """A model to build from scratch with random weights."""

    hidden_size: Positive = 256
    intermediate_size: Positive = 768
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive = 4
    context_length: Positive = 512


class Data(Section):
    """What is trained on: generated tasks with their shares, or a JSONL file of prompt/response."""

    tasks: dict[str, Annotated[float, Field(gt=0)]] | None = None
    file: str | None = None
    row_length: Positive = 192  # tokens a packed row
    rows: Positive = 32  # packed rows a step, over all processes
    padded_share: Ratio = 0.5  # samples filled to the task's full response length with end tokens
    short_tail: Annotated[int, Field(ge=0)] = 7  # most end tokens after the first, in the others
    tail_weight: Ratio = 0.1  # loss weight of end tokens after the first

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if (self.tasks is None) == (self.file is None):
            raise ValueError("exactly one of data.tasks and data.file must be given")
        return self


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

    objective: Literal["masked_diffusion", "next_token", "d2f"]
    output: str
    steps: Positive
    data: Data
    seed: int = 0
    family: str | None = None  # of the result; default: that of init
    init: str | None = None  # checkpoint to start from
    model: ModelShape | None = None  # or the shape to start from scratch
    tokenizer: str | None = None  # folder; default: that of init, or the tasks' own
    block_size: Positive = 16  # of D2F training
    distill_target: Literal["soft", "hard"] = "soft"  # teacher's distribution, or the clean ids
    optimizer: Optimizer = Optimizer()
    noise: Noise = Noise()
    lora: Lora = Lora()
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    base_dtype: Literal["float32", "bfloat16"] = "float32"  # d2f: of the frozen weights
    quantize: Literal["none", "4bit"] = "none"  # d2f: of the frozen weights (QLoRA)
    gradient_checkpointing: bool = False  # compute each layer again in the backward pass
    gradient_accumulation: Positive = 1  # parts that a process feeds its rows of a step in
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
        if self.objective == "d2f" and self.init is None:
            raise ValueError("objective d2f needs init: the model that is teacher and base")
        if self.objective != "d2f" and (self.quantize, self.base_dtype) != ("none", "float32"):
            raise ValueError(
                f"quantize and base_dtype are of frozen weights: objective {self.objective} trains "
                "them all, in float32"
            )
        if self.objective == "d2f" and self.block_size > self.data.row_length:
            raise ValueError(
                f"block_size must not exceed data.row_length {self.data.row_length}, "
                f"got {self.block_size}"
            )
        if self.model is not None and self.family is None:
            raise ValueError("a model from scratch needs a family")
        if self.noise.low > self.noise.high:
            raise ValueError("noise.low must not exceed noise.high")
        if self.noise.min_ratio > self.noise.max_ratio:
            raise ValueError("noise.min_ratio must not exceed noise.max_ratio")
        return self

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
