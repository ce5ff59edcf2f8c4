"""The keys of a training run's configuration, below what checks them together, so that an objective
can say which of them it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from d2f.config import (
    FileSize,
    Positive,
    Problems,
    Ratio,
    Section,
    Seed,
    Share,
    Switch,
    Text,
    Threads,
    Tokens,
    Weight,
    Whole,
)
from d2f.errors import InputError
from d2f.tasks import Task, find_tasks
from d2f.tasks.task import TASKS

# The sections of a training run's configuration, but for its data (`distill.config_keys`).

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


# The configuration's section `data`: what is trained on, how long it may be, how it is packed.

MOST_PLACES = 2**28  # of a step


def _known(task: str) -> str:
    if task not in TASKS:
        raise ValueError(f"expected a task among {', '.join(TASKS)}, got {task!r:.60}")
    return task


TaskDataConfig = Annotated[str, AfterValidator(_known)]


class Columns(Section):
    """Where a row has its prompt and response: two text columns, or a list of chat messages."""

    prompt: Text | None = None
    """Column of the prompt's text."""
    response: Text | None = None
    """Column of the response's text."""
    messages: Text | None = None
    """Column of a list of chat messages; the last assistant turn is the response."""
    role: Text = "role"
    """Key of the role within a message."""
    content: Text = "content"
    """Key of the text within a message."""
    system: Text | None = None
    """Column of a system message, put first where it is not empty."""

    @model_validator(mode="after")
    def _one_form(self) -> Columns:
        pair = (self.prompt is not None) + (self.response is not None)
        if pair != (2 if self.messages is None else 0):
            raise ValueError("columns need either prompt and response, or messages")
        if self.messages is None and (self.role, self.content) != ("role", "content"):
            raise ValueError("columns.role and columns.content are names within columns.messages")
        return self


COLUMNS = {
    # bespokelabs/Bespoke-Stratos-17k and what follows its layout
    "bespoke-stratos": Columns(
        messages="conversations", role="from", content="value", system="system"
    ),
    # Lansechen/bs17k_collection_filtered_*, which the published D2F models were trained on
    "d2f-reference": Columns(prompt="question", response="qwen7b_answer"),
}


class Data(Section):
    """What is trained on: generated tasks with their shares, a file (JSONL; parquet by its ending),
    or a Hugging Face data set by folder or hub name.

    A row is `prompt` and `response`, or `messages` whose last assistant turn is the response and
    whose earlier turns are the prompt; `columns` names them otherwise, or is a name of `COLUMNS`.

    Padding. A response ends with one end token; what follows it is the tail, more end tokens.
    Of a file or data set nothing of it is trained on unless asked. `train_on_padding: true` is the
    preset for what the published D2F code does: padded_share 1, short_tail 0, tail_weight 1, so
    each response is filled up with end tokens to its full length, all of them targets. The full
    length is `max_response` where given, else what the prompt leaves of `row_length` (then a row
    holds one sample, as there). The published data for LLaDA is `columns: d2f-reference`,
    `row_length: 1024`, `end_token: "<|eot_id|>"`, `on_long: drop`; for Dream it is
    `max_prompt: 924` and `on_long: truncate`.
    """

    tasks: Annotated[dict[TaskDataConfig, Share], Field(min_length=1)] | None = None
    """Generated tasks with their shares of the samples."""
    file: Text | None = None
    """A file of rows: JSONL, or parquet by its ending."""
    dataset: Text | None = None
    """A folder of save_to_disk, or what load_dataset takes."""
    dataset_config: Text | None = None
    """The data set's configuration, where it has several."""
    split: Text | None = None
    """Of the data set; default train."""
    columns: Text | Columns | None = None
    """Names of the columns, or one of their presets; default: as the rows say by their keys."""
    chat_template: Literal["tokenizer", "none"] = "tokenizer"
    """none: the prompt's text as it is."""
    end_token: Text | None = None
    """That ends a response; default the model's first end token."""
    max_prompt: Tokens | None = None
    """Tokens; a longer prompt is never cut."""
    max_response: Tokens | None = None
    """Tokens, with the end token."""
    on_long: Literal["error", "drop", "truncate"] = "error"
    """A sample that is too long: an error, left out, or its response cut (then without end token;
    left out where the prompt is too long). Counted and reported."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A broken row; skipped ones are counted."""
    measure_rows: Whole = 100_000
    """Most rows whose tokens are counted before the first step. Of a larger file only the form is
    checked then, and lengths are judged as the rows come."""
    row_length: Tokens = 192
    """Tokens a packed row."""
    rows: Annotated[int, Field(ge=1, le=2**16)] = 32
    """Packed rows a step, over all processes."""
    train_on_padding: Switch = False
    """Preset of the three below: responses are filled up with end tokens, all of them targets."""
    padded_share: Ratio = 0.5
    """Samples filled to the full response length with end tokens; 0 for files and data sets."""
    short_tail: Annotated[int, Field(ge=0, le=2**20)] = 7
    """Most end tokens after the first, in the other samples; 0 for files and data sets."""
    tail_weight: Ratio = 0.1
    """Loss weight of end tokens after the first."""

    @model_validator(mode="before")
    @classmethod
    def _tail_of_files(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("tasks") is not None:
            return values
        if values.get("train_on_padding") is True:
            return {"padded_share": 1.0, "short_tail": 0, "tail_weight": 1.0} | values
        return {"padded_share": 0.0, "short_tail": 0} | values

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if sum(s is not None for s in (self.tasks, self.file, self.dataset)) != 1:
            raise ValueError(
                "one of data.dataset, data.tasks and data.file must be given, and only one"
            )
        only = [] if self.dataset is not None else ["dataset_config", "split"]
        if self.tasks is not None:
            only += ["columns", "max_prompt", "max_response", "on_long", "on_bad_row"]
            only += ["measure_rows", "train_on_padding"]
        fields = type(self).model_fields
        idle = [f"data.{name}" for name in only if getattr(self, name) != fields[name].default]
        if idle:
            what = "files and data sets" if self.tasks is not None else "data.dataset"
            raise ValueError(f"{', '.join(idle)}: nothing reads it here, it is for {what} only")
        if self.rows * self.row_length > MOST_PLACES:
            raise ValueError(
                f"data.rows x data.row_length must be at most {MOST_PLACES}, "
                f"got {self.rows} x {self.row_length}"
            )
        if isinstance(self.columns, str) and self.columns not in COLUMNS:
            raise ValueError(
                f"data.columns must be one of {', '.join(COLUMNS)}, or name the columns, "
                f"got {self.columns!r}"
            )
        return self

    @property
    def layout(self) -> Columns | None:
        """The columns, None where each row says by its keys what it is."""
        return COLUMNS[self.columns] if isinstance(self.columns, str) else self.columns


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
