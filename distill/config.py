"""The typed configuration of a training run, from YAML with command-line overrides.

Frozen; an unknown key or a wrong type is an error before any work; the resolved configuration is
saved with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticKnownError

from d2f.config import check, dump, override, read_mapping
from d2f.files import write_beside
from d2f.shipped import TRAINING, find_config
from distill.config_keys import TrainKeys, section_keys
from distill.objectives.kinds import KINDS, Kind

# Keys of a training configuration that nothing would read, given its other keys: each is an error
# where it has another value than its default, as a key is there to change something. What belongs
# to
# a switch (evaluation to eval_every, wandb_mode to tracker, final_lr_share to the schedule, what a
# weight of 0 leaves out) may stay while the switch is off.

_OF_TEXT = ["data." + name for name in (
    "columns", "chat_template", "end_token", "max_prompt", "max_response", "on_long", "on_bad_row",
    "measure_rows",
)]  # fmt: skip
_OF_TAILS = ["data." + name for name in (
    "train_on_padding", "padded_share", "short_tail", "tail_weight",
)]  # fmt: skip
_OF_DECODING = ["evaluation." + name for name in (
    "allow_code_execution", "problems", "split", "decoder", "options",
)]  # fmt: skip
_OF_FRESH_LORA = [key for key in section_keys("lora") if key != "lora.targets"]
# Every key that some runs do not read, by what does read it.
_READERS: list[tuple[str, list[str]]] = [
    ("a model from scratch, init has its own", ["tokenizer"]),
    ("a run that trains a fresh adapter", _OF_FRESH_LORA),
    ("objectives that train an adapter", ["lora.targets"]),
    ("d2f, wedlm and wino_plus", ["block_size"]),
    (
        "objective d2f",
        ["distill_target", "weighting", "noise.schedule", "noise.monotone_share"],
    ),
    ("objective d2f with samples of pipeline states", ["noise.states"]),
    ("monotone samples of objective d2f (noise.monotone_share)", ["noise.low", "noise.high"]),
    (
        "masked_diffusion, and d2f with noise.schedule clean_prefix or samples of pipeline states "
        "that are drawn (noise.monotone_share below 1, no noise.states)",
        ["noise.min_ratio"],
    ),
    (
        "objective d2f with samples of pipeline states that are drawn "
        "(noise.monotone_share below 1, no noise.states)",
        ["noise.most_active"],
    ),
    (
        "masked_diffusion with noise.uniform_share, d2f with noise.monotone_share below 1",
        ["noise.far_weight"],
    ),
    (
        "objective masked_diffusion",
        ["noise.uniform_share", "noise.causal_share", "noise.cart_p"],
    ),
    (
        "uniform samples of objective masked_diffusion (noise.uniform_share)",
        ["noise.max_ratio"],
    ),
    ("objective masked_diffusion with noise.uniform_share below 1", ["noise.block_sizes"]),
    ("objective wino_plus", section_keys("wino_plus")),
    ("objective wedlm", section_keys("wedlm")),
    ("rows of text, and wino_plus reads rollouts", _OF_TEXT),
    ("evaluations that decode (evaluation.tasks or data.tasks)", _OF_DECODING),
    (
        "a held-out loss (evaluation.loss_rows, evaluation.loss_file) of an objective that masks "
        "by a ratio",
        ["evaluation.loss_ratios"],
    ),
    ("objectives that train on a response's tail (wino_plus.tail is of its own)", _OF_TAILS),
]


def unread(config: TrainKeys) -> dict[str, str]:
    """What would read each key that nothing reads, by the key with dots into its section."""
    kind = KINDS[config.objective]
    read = kind.reads(config)
    if config.init is None:
        read.add("tokenizer")
    if kind.trains_adapter(config):
        read |= {"lora.targets", *(_OF_FRESH_LORA if config.init_adapter is None else ())}
    if kind.reads_text:
        read |= {*_OF_TEXT, *(_OF_TAILS if kind.tail else ())}
    # While the switch eval_every is off, what belongs to it may stay.
    if config.eval_every is None or config.evaluation.tasks or config.data.tasks:
        read |= set(_OF_DECODING)
    if config.evaluation.wants_loss and kind.masks_by_ratio:
        read.add("evaluation.loss_ratios")
    return {key: reader for reader, keys in _READERS for key in keys if key not in read}


def refuse_unread(config: TrainKeys) -> None:
    """Raise ValueError for a key that is given though nothing reads it."""
    given = [
        f"{key}: nothing reads it here, it is for {reader}; leave it out"
        for key, reader in unread(config).items()
        if value_of(config, key) != _default(config, key)
    ]
    if given:
        raise ValueError("; ".join(given))


def value_of(config: TrainKeys, key: str) -> Any:
    """The value of a key with dots into its section."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _default(config: TrainKeys, key: str) -> Any:
    """The value that a key has where it is not given."""
    if key in ("data.padded_share", "data.short_tail") and config.data.tasks is None:
        return 0
    section, _, name = key.rpartition(".")
    owner = value_of(config, section) if section else config
    return type(owner).model_fields[name].get_default(call_default_factory=True)


def _known(name: object) -> object:
    """Raise what an unknown choice raises. No Literal: an objective may be added to KINDS."""
    if not isinstance(name, str) or name not in KINDS:
        *most, last = map(repr, KINDS)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(most)} or {last}"})
    return name


class TrainConfig(TrainKeys):
    """One training run."""

    objective: Annotated[str, BeforeValidator(_known), WithJsonSchema({"enum": list(KINDS)})]
    """What is trained; see docs/training.md."""

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
        self.kind.check(self)
        if not self.trains_adapter and (self.quantize, self.base_dtype) != ("none", "float32"):
            raise ValueError(
                f"quantize and base_dtype are of frozen weights: objective {self.objective} trains "
                "them all, in float32"
            )
        if self.compile and self.quantize != "none":
            raise ValueError(f"compile needs weights that are not quantised, got {self.quantize}")
        if self.block_causal and max(self.block_shares) > self.data.row_length:
            raise ValueError(
                f"block_size must not exceed data.row_length {self.data.row_length}, "
                f"got {max(self.block_shares)}"
            )
        if self.model is not None and self.family is None:
            raise ValueError("a model from scratch needs a family")
        if self.drop_biases and (self.init is None or self.family is None):
            raise ValueError("drop_biases needs init and the family that it becomes")
        self._check_evaluation()
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

    def _check_evaluation(self) -> None:
        settings, loss = self.evaluation, self.evaluation.wants_loss
        if self.eval_every is not None and not (self.decodes_tasks or loss):
            raise ValueError(
                "eval_every needs evaluation.tasks where data.tasks names none, or a held-out loss "
                "(evaluation.loss_rows, evaluation.loss_file)"
            )
        lacking = {
            "accuracy": "" if self.decodes_tasks else "evaluation.tasks or data.tasks",
            "cross_entropy": "" if loss else "evaluation.loss_rows or evaluation.loss_file",
        }
        lacking["kl"] = lacking["cross_entropy"] if self.kind.has_teacher else "objective d2f"
        if settings.best_by is not None and lacking[settings.best_by]:
            needs = lacking[settings.best_by]
            raise ValueError(f"evaluation.best_by: {settings.best_by} needs {needs}")

    @property
    def decodes_tasks(self) -> bool:
        """Whether an evaluation decodes problems."""
        return bool(self.evaluation.tasks or self.data.tasks)

    @property
    def best_by(self) -> str:
        """What the best checkpoint is chosen by."""
        if self.evaluation.best_by is not None:
            return self.evaluation.best_by
        if self.decodes_tasks:
            return "accuracy"
        return "kl" if self.kind.has_teacher and self.distill_target != "hard" else "cross_entropy"

    @property
    def kind(self) -> Kind:
        """What there is to know of the objective before torch is there."""
        return KINDS[self.objective]

    @property
    def trains_adapter(self) -> bool:
        """Whether the weights of init stay as they are and a LoRA on them is trained."""
        return self.kind.trains_adapter(self)

    @property
    def block_causal(self) -> bool:
        """Whether the result is a D2F student."""
        return self.kind.block_causal(self)

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
