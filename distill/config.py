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
from d2f.files import write_beside
from d2f.quantities import Positive, Seed, Share, Text, Tokens
from d2f.shipped import TRAINING, find_config
from d2f.yaml_core import dump
from distill.config_sections import Evaluation, Lora, ModelShape, Noise, Optimizer, Wedlm, WinoPlus
from distill.data.data_config import Data
from distill.unread_keys import refuse_unread

# One size, several with equal shares, or sizes with their shares of the samples.
BlockSizes = (
    Tokens
    | Annotated[tuple[Tokens, ...], Field(min_length=1)]
    | Annotated[dict[Tokens, Share], Field(min_length=1)]
)


class TrainConfig(Section):
    """One training run."""

    objective: Literal["masked_diffusion", "next_token", "d2f", "wino_plus", "wedlm"]
    """What is trained; see docs/training.md."""
    output: Text
    """Folder of the run: checkpoints, log, and the result."""
    steps: Positive
    """Optimizer steps."""
    data: Data
    """What is trained on."""
    seed: Seed = 0
    """Of weights, noise, order of the rows and generated problems."""
    family: Text | None = None
    """Of the result; default: that of init. A model from scratch needs it."""
    init: Text | None = None
    """Checkpoint to start from: folder, hub name or bundled name. Either it or model."""
    init_adapter: Text | None = None
    """Adapter of init to train on; default: a fresh one."""
    model: ModelShape | None = None
    """Shape of a model to start from scratch."""
    tokenizer: Text | None = None
    """Of a model from scratch, folder or hub name; default: the tasks' own."""
    block_size: BlockSizes = 16
    """Of d2f, wedlm and wino_plus (that of its rollouts): one, several with equal shares, or sizes
    with their shares of the samples. Of several, decoders take the first."""
    distill_target: Literal["soft", "hard"] = "soft"
    """d2f: the teacher's distribution, or the clean ids."""
    optimizer: Optimizer = Optimizer()
    """AdamW and its rate."""
    noise: Noise = Noise()
    """Mask ratios of masked_diffusion and d2f."""
    wino_plus: WinoPlus = WinoPlus()
    """The objective wino_plus."""
    lora: Lora = Lora()
    """The adapter that is trained."""
    wedlm: Wedlm = Wedlm()
    """The objective wedlm."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast of the forward pass; what is trained stays in fp32."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of frozen weights."""
    quantize: Literal["none", "4bit"] = "none"
    """Of frozen weights (QLoRA)."""
    gradient_checkpointing: Switch = False
    """Compute each layer again in the backward pass, for less memory."""
    gradient_accumulation: Positive = 1
    """Parts that a process feeds its rows of a step in; data.rows is a multiple of it."""
    attention: Literal["auto", "kernel", "sdpa", "flex"] = "auto"
    """Attention of training: auto measures on a GPU which is fastest, and is sdpa on a CPU."""
    save_every: Positive = 200
    """Steps between checkpoints."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    eval_every: Positive | None = None
    """Steps between evaluations; the last step is one. Default: none."""
    evaluation: Evaluation = Evaluation()
    """What is decoded then."""
    export_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of the result."""
    export_official: Switch = False
    """Write the result also in the format that the family's own code reads."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Where values are logged beside log.jsonl; its files lie in output."""
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """Of the tracker wandb."""
    log_every: Positive = 10
    """Steps between lines of the log."""

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
            raise ValueError(
                "objective wino_plus needs data.file: a file of distill.rollouts.__main__"
            )
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
            raise ValueError(
                f"noise.low must not exceed noise.high {self.noise.high}, got {self.noise.low}"
            )
        if self.noise.min_ratio > self.noise.max_ratio:
            raise ValueError(
                f"noise.min_ratio must not exceed noise.max_ratio {self.noise.max_ratio}, "
                f"got {self.noise.min_ratio}"
            )
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
        write_beside(path, dump(self.model_dump(mode="json")))


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
