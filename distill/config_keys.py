"""The keys of a training run's configuration, below what checks them together, so that an objective
can say which of them it reads."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from d2f.configuration import Section, Switch
from d2f.quantities import FileSize, Positive, Seed, Share, Text, Threads, Tokens
from distill.config_sections import Evaluation, Lora, ModelShape, Noise, Optimizer, Wedlm, WinoPlus
from distill.data.data_config import Data

# One size, several with equal shares, or sizes with their shares of the samples.
BlockSizes = (
    Tokens
    | Annotated[tuple[Tokens, ...], Field(min_length=1)]
    | Annotated[dict[Tokens, Share], Field(min_length=1)]
)


class TrainKeys(Section):
    """What a training run is told; `distill.config.TrainConfig` checks it as a whole."""

    objective: str
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
    drop_biases: Switch = False
    """Leave out init's biases where family has no place for them (Dream's or Qwen2's in LLaDA's
    layout): what they did, training has to learn again. Otherwise that is an error."""
    init_adapter: Text | None = None
    """Adapter of init to train on; default: a fresh one."""
    model: ModelShape | None = None
    """Shape of a model to start from scratch."""
    tokenizer: Text | None = None
    """Of a model from scratch, folder or hub name; default: the tasks' own."""
    block_size: BlockSizes = 16
    """Of d2f, wedlm and wino_plus (that of its rollouts): one, several with equal shares, or sizes
    with their shares of the samples. Of several, decoders take the first."""
    distill_target: Literal["soft", "reverse", "hard"] = "soft"
    """d2f: KL(teacher || student), as the official code; reverse: KL(student || teacher), as the
    paper; hard: cross-entropy with the clean ids."""
    weighting: Literal["inverse_ratio", "equal"] = "inverse_ratio"
    """d2f: a masked token's weight, 1 / ratio of its block as the official code has it, or 1."""
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
    compile: Switch = False
    """Decoder layers through torch.compile: a faster step and less memory after a slow first one;
    the same curve to rounding. One process or DDP, weights that are not quantised."""
    gradient_accumulation: Positive = 1
    """Parts that a process feeds its rows of a step in; data.rows is a multiple of it."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention of training: auto measures on a GPU which is fastest, and is sdpa on a CPU."""
    threads: Threads | Literal["auto"] | None = None
    """Of a step on a CPU; auto measures as it goes which number is fastest (docs/cpu.md), and the
    same run may then differ in the last digits. Default: torch's, no more than the processors that
    the process may use."""
    save_every: Positive = 200
    """Steps between checkpoints."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    eval_every: Positive | None = None
    """Steps between evaluations; the last step is one. Default: none."""
    evaluation: Evaluation = Evaluation()
    """What is measured then, and what is held back for it."""
    export_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Of the result."""
    max_shard_size: FileSize = "50GB"
    """Of the result: most bytes of a file of weights; what is more goes into several."""
    export_official: Switch = False
    """Write the result also in the format that the family's own code reads."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Where values are logged beside log.jsonl; its files lie in output."""
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """Of the tracker wandb."""
    log_every: Positive = 10
    """Steps between lines of the log."""

    @property
    def block_shares(self) -> dict[int, float]:
        """Share of the samples that are trained with each block size, in the given order."""
        sizes = self.block_size
        if isinstance(sizes, int):
            return {sizes: 1.0}
        if not isinstance(sizes, dict):
            return {size: sizes.count(size) / len(sizes) for size in sizes}
        return {size: share / sum(sizes.values()) for size, share in sizes.items()}


def section_keys(section: str) -> list[str]:
    """The keys of a section, with dots: ``wedlm.weights`` and so on."""
    return [
        f"{section}.{name}" for name in type(TrainKeys.model_fields[section].default).model_fields
    ]
