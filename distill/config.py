"""Read the configuration of a training run: YAML, checked by pydantic, with command-line overrides.

`TrainConfig` is what a run reads; its section `objective` has the keys of the objective that it
names, which that objective's own file defines (`distill/objectives/`), so a key of another
objective is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model, model_validator

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
    check,
    dump,
    override,
    read_mapping,
)
from d2f.errors import InputError, not_one_of
from d2f.files import write_beside
from d2f.flags import check_model_name, family_names
from d2f.shipped import TRAINING, find_config
from d2f.tasks import Task, find_tasks
from d2f.tasks.judges import CodeExecution
from d2f.tasks.task import RESPONSE_LENGTH, TASKS
from distill.objectives import OBJECTIVES

MaskRatio = Annotated[float, Field(gt=0, le=1)]
# A size, several with equal shares, or sizes with their shares of the samples.
BlockSizes = (
    Tokens
    | Annotated[tuple[Tokens, ...], Field(min_length=1)]
    | Annotated[dict[Tokens, Share], Field(min_length=1)]
)
_Heads = Annotated[int, Field(ge=1, le=1024)]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class ModelShape(Section):
    """A model to build from scratch with random weights."""

    hidden_size: Annotated[int, Field(ge=1, le=2**16)] = 256
    """A multiple of twice the heads (RoPE turns pairs)."""
    intermediate_size: Annotated[int, Field(ge=1, le=2**18)] = 768
    """Width of the MLP."""
    layers: Annotated[int, Field(ge=1, le=1000)] = 4
    """Decoder layers."""
    heads: _Heads = 4
    """Query heads, a multiple of kv_heads."""
    kv_heads: _Heads = 4
    """Key and value heads."""
    context_length: Tokens = 512
    """Positions that the model is made for."""

    @model_validator(mode="after")
    def _divisible(self) -> ModelShape:
        if self.hidden_size % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                "expected hidden_size a multiple of 2 x heads and heads one of kv_heads, got "
                f"{self.hidden_size}, {self.heads} and {self.kv_heads}"
            )
        return self


class Lora(Section):
    """The adapter that d2f, wino_plus and, where asked for, wedlm train."""

    r: Annotated[int, Field(ge=1, le=8192)] = 32
    """Rank."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """The update is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Dropout of the adapter's input."""
    targets: Annotated[tuple[Module, ...], Field(min_length=1)] = (
        "q_proj", "k_proj", "v_proj", "o_proj",
    )  # fmt: skip
    """Linear layers that are adapted, by transformers' names. With init_adapter the default stands
    for its own; others are its own and further ones, which begin at no change."""


class Evaluation(Section):
    """Choose what is measured every `eval_every` steps: held-out problems that are decoded
    (`tasks`), a held-out loss (`loss_rows`, `loss_file`), or both."""

    tasks: Annotated[tuple[Text, ...], Field(min_length=1)] | None = None
    """Generated ones, or task files; default: those of data.tasks."""
    allow_code_execution: CodeExecution = False
    """Let the judge python run what the model writes, on this machine."""
    problems: Problems = 32
    """Problems of each task."""
    split: Literal["tuning", "heldout"] = "tuning"
    """Split of the problems, of a held-out loss too."""
    batch_size: Annotated[int, Field(ge=1, le=10**5)] = 32
    """Most requests, or samples of a held-out loss, in a forward."""
    decoder: Text | None = None
    """Default: the one that suits what is trained."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the decoder, by the names of its command-line flags with underscores."""
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
    """The measure of the best checkpoint, by most accuracy or least loss. Default: accuracy where
    tasks are decoded, else kl of d2f that learns by it, else cross_entropy."""

    @property
    def wants_loss(self) -> bool:
        """True if a held-out loss is asked for."""
        return self.loss_rows is not None or self.loss_file is not None

    @model_validator(mode="after")
    def _known(self) -> Evaluation:
        try:
            self.chosen(())
        except InputError as error:
            raise ValueError(f"tasks: {error}") from error
        return self

    def chosen(self, otherwise: Sequence[str]) -> tuple[Task, ...]:
        """Return the tasks themselves. otherwise: where none are named. Raises InputError."""
        names = self.tasks or otherwise
        return find_tasks(names, allow_code_execution=self.allow_code_execution) if names else ()


class Optimizer(Section):
    """AdamW and its rate."""

    lr: Annotated[float, Field(gt=0, le=10)] = 1e-3
    """Greatest learning rate."""
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 100
    """Steps in which the rate rises to lr."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """Course of the rate after the warm-up."""
    final_lr_share: Ratio = 0.05
    """cosine: share of lr at the end."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay of the two running means."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """Added to the denominator."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.05
    """Decoupled, times the rate."""
    clip: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    """Norm that gradients are scaled down to."""


class Columns(Section):
    """Name the columns of a row: prompt and response, a list of chat messages that ends with the
    response, or messages and response (as `d2f batch` writes them: messages and text)."""

    prompt: Text | None = None
    """Column of the prompt's text."""
    response: Text | None = None
    """Column of the response's text."""
    messages: Text | None = None
    """Column of a list of chat messages; the last assistant turn is the response, where no column
    is named for it."""
    role: Text = "role"
    """Key of the role within a message."""
    content: Text = "content"
    """Key of the text within a message."""
    system: Text | None = None
    """Column of a system message, put first where it is not empty."""

    @model_validator(mode="after")
    def _one_form(self) -> Columns:
        asked = [name for name in (self.prompt, self.messages) if name is not None]
        if len(asked) != 1 or (self.prompt is not None and self.response is None):
            raise ValueError("columns need prompt and response, messages, or messages and response")
        return self


COLUMNS = {
    # bespokelabs/Bespoke-Stratos-17k and what follows its layout
    "bespoke-stratos": Columns(
        messages="conversations", role="from", content="value", system="system"
    ),
    # Lansechen/bs17k_collection_filtered_*, which the published D2F models were trained on
    "d2f-reference": Columns(prompt="question", response="qwen7b_answer"),
}


def _known(names: Collection[str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in names:
            raise ValueError(not_one_of(name, names))
        return name

    return AfterValidator(check)


class Data(Section):
    """Choose the training data: generated tasks with their shares, a file (JSONL; parquet, CSV or a
    list in JSON by its ending), or a Hugging Face data set by folder or hub name.

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

    tasks: Annotated[dict[Annotated[str, _known(TASKS)], Share], Field(min_length=1)] | None = None
    """Generated tasks with their shares of the samples."""
    file: Text | None = None
    """A file of rows: JSONL; parquet, CSV or a list in JSON by its ending."""
    dataset: Text | None = None
    """A folder of save_to_disk, or what load_dataset takes."""
    dataset_config: Text | None = None
    """The data set's configuration, where it has several."""
    split: Text | None = None
    """Split of the data set; default train."""
    columns: Annotated[Text, _known(COLUMNS)] | Columns | None = None
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
        padding = values.get("train_on_padding") is True
        share, weight = (1.0, 1.0) if padding else (0.0, 0.1)
        return {"padded_share": share, "short_tail": 0, "tail_weight": weight} | values

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if sum(s is not None for s in (self.tasks, self.file, self.dataset)) != 1:
            raise ValueError(
                "one of data.dataset, data.tasks and data.file must be given, and only one"
            )
        return self

    @property
    def longest_response(self) -> int | None:
        """The longest response that is trained on, in tokens; None where only the rows say it."""
        if self.tasks is not None:
            return max(RESPONSE_LENGTH[task] for task in self.tasks)
        return self.max_response

    @property
    def layout(self) -> Columns | None:
        """The columns, None where each row says by its keys what it is."""
        return COLUMNS[self.columns] if isinstance(self.columns, str) else self.columns


class Options(Section):
    """The section `objective`. Each objective subclasses it, in its own file, with the keys that it
    reads; the class attributes say what the rest of a run must know of it."""

    name: Text
    """The objective; see docs/training.md."""

    prompt_rule: ClassVar[str]
    """Attention of the prompt in the result (`d2f.contract.Contract`)."""
    has_tail: ClassVar[bool] = True
    """True if samples of text carry end tokens after the first."""
    masks_by_ratio: ClassVar[bool] = False
    """True if a held-out loss sets the share of hidden tokens (`Objective.mask_ratio`); else it
    hides what training would."""
    is_merged: ClassVar[bool] = True
    """False if the adapter that is trained stays beside its base, and no whole model is written."""
    has_teacher: ClassVar[bool] = False
    """True if it learns a teacher's distribution, so that a held-out KL says how well."""

    @property
    def trained_lora(self) -> Lora | None:
        """The adapter that is trained on frozen weights; None where all weights are trained."""
        return getattr(self, "lora", None)

    @property
    def block_shares(self) -> dict[int, float]:
        """Share of the samples that are trained with each block size, in the given order."""
        sizes: BlockSizes = getattr(self, "block_size", ())
        if isinstance(sizes, int):
            return {sizes: 1.0}
        if isinstance(sizes, dict):
            return {size: share / sum(sizes.values()) for size, share in sizes.items()}
        return {size: sizes.count(size) / len(sizes) for size in sizes}

    @property
    def best_loss(self) -> str:
        """The held-out loss that the best checkpoint is chosen by."""
        return "cross_entropy"

    def check(self, config: TrainConfig) -> None:
        """Raise ValueError for keys outside the section that do not go with it."""
        if max(self.block_shares, default=0) > config.data.row_length:
            raise ValueError(
                f"objective.block_size must not exceed data.row_length {config.data.row_length}, "
                f"got {max(self.block_shares)}"
            )

    def contract(self) -> dict[str, object]:
        """Return what decoding must know of the result: fields of `d2f.contract.Contract`."""
        found: dict[str, object] = {"objective": self.name, "prompt_rule": self.prompt_rule}
        if self.block_shares:  # of several, decoders take the first
            found["block_size"] = next(iter(self.block_shares))
        return found


class Settings(Section):
    """The keys of a training run beside `objective`."""

    output: Text
    """Folder of the run: checkpoints, log, and the result."""
    steps: Positive
    """Optimizer steps."""
    data: Data
    """The training data."""
    seed: Seed = 0
    """Seed of weights, noise, order of the rows and generated problems."""
    family: Annotated[Text, _known(family_names())] | None = None
    """Family of the result; default: that of init. A model from scratch needs it."""
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
    """Tokenizer of a model from scratch, folder or hub name; default: the tasks' own."""
    optimizer: Optimizer = Optimizer()
    """AdamW and its rate."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast of the forward pass; what is trained stays in fp32."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of frozen weights."""
    quantize: Literal["none", "4bit"] = "none"
    """Quantisation of frozen weights (QLoRA)."""
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
    """Threads of a step on a CPU; auto chooses at the start by how busy the processors are
    (docs/performance.md), and the same run may then differ in the last digits. Default: torch's, no
    more than the processors that the process may use."""
    save_every: Positive = 200
    """Steps between checkpoints."""
    keep: Positive = 2
    """Newest checkpoints kept."""
    eval_every: Positive | None = None
    """Steps between evaluations; the last step is one. Default: none."""
    evaluation: Evaluation = Evaluation()
    """Measurements of an evaluation, and what is held back for them."""
    export_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Dtype of the result."""
    max_shard_size: FileSize = "50GB"
    """Most bytes of a file of weights of the result; a larger one is written as several."""
    export_official: Switch = False
    """Write the result also in the format that the family's own code reads."""
    tracker: Literal["none", "wandb", "tensorboard"] = "none"
    """Tracker of values beside log.jsonl; its files lie in output."""
    wandb_mode: Literal["offline", "online", "disabled"] = "offline"
    """Mode of the tracker wandb."""
    log_every: Positive = 10
    """Steps between lines of the log."""


class TrainConfig(Settings):
    """Configure a training run."""

    objective: Options
    """The objective by its name, with its keys."""

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        of = f"objective {self.objective.name}"
        frozen = (self.init_adapter, self.quantize, self.base_dtype) != (None, "none", "float32")
        if (self.init is None) == (self.model is None):
            raise ValueError("exactly one of init and model must be given")
        if self.model is not None and self.family is None:
            raise ValueError("a model from scratch needs a family")
        if self.trains_adapter and self.init is None:
            raise ValueError(f"{of} needs init: the model that the adapter is for")
        if frozen and not self.trains_adapter:
            raise ValueError(
                f"init_adapter, quantize and base_dtype are of frozen weights: {of} trains them "
                "all, in float32"
            )
        if self.compile and self.quantize != "none":
            raise ValueError(f"compile needs weights that are not quantised, got {self.quantize}")
        self.objective.check(self)
        measured = {
            "accuracy": self.decodes_tasks,
            "cross_entropy": self.evaluation.wants_loss,
            "kl": self.evaluation.wants_loss and self.objective.has_teacher,
        }
        if self.eval_every is not None and not any(measured.values()):
            raise ValueError(
                "eval_every needs evaluation.tasks where data.tasks names none, or a held-out loss "
                "(evaluation.loss_rows, evaluation.loss_file)"
            )
        if not measured.get(self.evaluation.best_by or "", True):
            found = ", ".join(name for name, is_there in measured.items() if is_there)
            raise ValueError(
                f"evaluation.best_by: {self.evaluation.best_by} is not measured, expected one of "
                f"{found or 'what evaluation.tasks or evaluation.loss_rows measures'}"
            )
        return self

    @property
    def decodes_tasks(self) -> bool:
        """True if an evaluation decodes problems."""
        return bool(self.evaluation.tasks or self.data.tasks)

    @property
    def best_by(self) -> str:
        """The measure by which the best checkpoint is chosen."""
        measured = "accuracy" if self.decodes_tasks else self.objective.best_loss
        return self.evaluation.best_by or measured

    @property
    def trains_adapter(self) -> bool:
        """True if the weights of init stay frozen and a LoRA on them is trained."""
        return self.objective.trained_lora is not None

    @property
    def yaml(self) -> str:
        """Write the resolved configuration as YAML."""
        values = self.model_dump(mode="json")
        return dump({"objective": values.pop("objective"), **values})

    def save(self, path: Path) -> None:
        write_beside(path, self.yaml)


class _Flags(Settings):
    """The keys that overrides may name, before it is known which objective is trained."""

    objective: dict[str, Any]


def read_config(
    path: str | Path, overrides: Sequence[str] = (), *, to_run: bool = False
) -> TrainConfig:
    """Read a YAML file, or the configuration of that name among those that ship with the package.

    overrides: pairs ``--key value``, with dots into sections. to_run: what it starts from must be
    there. Raises InputError that names each key, what was expected and what came.
    """
    values = with_section(read_mapping(find_config(path, *TRAINING)), str(path))
    today = [f"--{renamed(word[2:])}" if word.startswith("--") else word for word in overrides]
    override(values, today, _Flags)
    of_objective = [
        word
        for flag, value in zip(today[::2], today[1::2], strict=True)
        for word in (flag, value)
        if flag.startswith("--objective.")
    ]
    if of_objective:  # again, with the keys of this objective known: a fault is then the flag's
        override(values, of_objective, _kind(_section(values["objective"]["name"], str(path))))
    config = parse_config(values, str(path))
    if to_run:
        _check_inputs(config)
    return config


def _check_inputs(settings: Settings) -> None:
    for key in ("init", "init_adapter"):
        if (name := getattr(settings, key)) is not None:
            check_model_name(name, key)
    file = settings.data.file
    if file is not None and not Path(file).exists():
        raise InputError(f"data.file {file}: no such file")


def parse_config(values: dict[str, Any], source: str) -> TrainConfig:
    """Check a configuration. source: names it in errors. Raises InputError."""
    values = with_section(values, source)
    section = values.get("objective")
    name = section.get("name") if isinstance(section, dict) else section
    return check(_kind(_section(name, source)), values, source)


def _section(name: object, source: str) -> type[Options]:
    try:
        section: type[Options] = OBJECTIVES[name].section
    except InputError as error:
        raise InputError(f"{source}: objective.name: {error}") from error
    return section


@cache
def _kind(section: type[Options]) -> type[TrainConfig]:
    """Make `TrainConfig` with the section of one objective."""
    return create_model("TrainConfig", __base__=TrainConfig, objective=(section, ...))


# Files of earlier versions have `objective: NAME` and the keys of all objectives beside it.
_EARLIER = (
    "block_size", "distill_target", "weighting", "noise", "lora", "wino_plus", "wedlm",
)  # fmt: skip
_WITHIN = ("wino_plus", "wedlm")  # their keys are now the objective's own


def with_section(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Put what an earlier version's file has beside ``objective: NAME`` into that section; the keys
    of other objectives are dropped. A file of today is returned as it is. Raises InputError."""
    name = values.get("objective")
    if not isinstance(name, str):
        return values
    known = _section(name, source).model_fields
    beside = {key: values[key] for key in _EARLIER if key in values}
    beside |= beside.get(name) or {}
    section = {"name": name} | {key: value for key, value in beside.items() if key in known}
    if isinstance(section.get("noise"), dict):
        keys = known["noise"].annotation.model_fields  # type: ignore[union-attr]
        section["noise"] = {key: v for key, v in section["noise"].items() if key in keys}
    rest = {key: value for key, value in values.items() if key not in _EARLIER}
    if isinstance(rest.get("data"), dict):  # rows are measured before the first step today
        rest["data"] = {key: v for key, v in rest["data"].items() if key != "measure_rows"}
    return rest | {"objective": section}


def renamed(key: str) -> str:
    """Return a key (dots lead into sections) of an earlier version as it is named today."""
    first, _, rest = key.replace("-", "_").partition(".")
    if first in _WITHIN:
        return f"objective.{rest}"
    if first in _EARLIER:
        return f"objective.{key}"
    return "objective.name" if key == "objective" else key
