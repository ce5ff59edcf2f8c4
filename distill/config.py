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

from d2f.configuration import check, override, read_mapping
from d2f.files import write_beside
from d2f.shipped import TRAINING, find_config
from d2f.yaml_core import dump
from distill.config_keys import TrainKeys
from distill.objectives.kinds import KINDS, Kind
from distill.unread_keys import refuse_unread


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
