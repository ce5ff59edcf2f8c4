"""Evaluate a model while it trains: decode held-out problems, take a held-out loss, keep the best.

Imported only where a run evaluates: beside rollouts it is the one place where training decodes. It
changes nothing that training sees: modules' modes and torch's random state are as they were.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from d2f.errors import InputError
from d2f.files import put_back
from d2f.model import DiffusionModel
from d2f.saving import save_adapter, save_model
from d2f.tasks import Problem, Task
from decode.cli import DecoderSettings
from decode.decoders import Decoder
from decode.evaluate import decode_and_judge
from decode.jobs import draw_problems, encode_problems, give_notices
from distill.config import TrainConfig
from distill.export import as_trained, files_of, write_result
from distill.heldout_loss import HeldoutLoss, loss_text
from distill.objectives.base import Objective
from distill.sharding import has_whole_weights, uncompiled

REPORT = "evaluation.json"


class Evaluator:
    """Decode the same problems each time, greedily unless the options say otherwise, take the
    held-out loss where there is one, and keep in ``best/`` the best result by `TrainConfig.best_by`
    (of equal accuracy the faster, of equals the first).

    Raises InputError before any work for an unknown task, decoder or option, a decoder that does
    not fit the model, a problem longer than its context, or weights that are split over processes.
    """

    def __init__(
        self, objective: Objective, loss: HeldoutLoss | None, accelerator: Accelerator
    ) -> None:
        if not has_whole_weights(accelerator):
            raise InputError(
                "eval_every evaluates on one process, whose weights must be whole: expected one "
                f"process, DDP or ZeRO-2, got {accelerator.distributed_type.value}"
            )
        self.config, self.loss, self.accelerator = objective.config, loss, accelerator
        self.model = as_trained(objective.model, self.config)
        self.best = Path(self.config.output) / "best"
        self.jobs = jobs(self.model, self.config)
        if accelerator.is_main_process:
            give_notices(task for task, _, _ in self.jobs)

    def run(self, step: int) -> dict[str, Any]:
        """Measure and keep the best; return values for the log and the tracker by name."""
        values: dict[str, Any] = {}
        with undisturbed(self.model), uncompiled(self.model.backbone):
            if self.jobs:
                values |= self._decode()
            if self.loss is not None:
                with self.accelerator.autocast():  # as training computes
                    values |= self.loss.measure()
        self._keep(step, values)
        return values

    def _decode(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        right: list[bool] = []
        tokens = forwards = 0
        for task, problems, decoder in self.jobs:
            batch_size = self.config.evaluation.batch_size
            judged = decode_and_judge(self.model, decoder, task, problems, batch_size=batch_size)
            right += judged.right
            tokens += sum(len(result.tokens) for result in judged.results)
            forwards += sum(result.forwards for result in judged.results)
            verdict = "right" if judged.right[0] else "wrong"
            name = f"evaluation/{task.name}"
            values[f"{name}/accuracy"] = sum(judged.right) / len(problems)
            values[f"{name}/problems"] = len(problems)
            values[f"{name}/example"] = (
                f"{problems[0].question}\n{judged.results[0].text}\n({verdict})"
            )
        values["evaluation/accuracy"] = sum(right) / len(right)
        values["evaluation/tokens_per_forward"] = tokens / forwards
        return values

    def _keep(self, step: int, values: dict[str, Any]) -> None:
        by = self.config.best_by

        def score(values: dict[str, Any]) -> list[float]:
            if by == "accuracy":
                return [values["evaluation/accuracy"], values["evaluation/tokens_per_forward"]]
            return [-values[f"evaluation/{by}"]]

        # A kill while the folder was replaced may have left the old one under another name.
        put_back(self.best)
        if not all(map(math.isfinite, score(values))):
            return
        # A report that is missing or damaged says of nothing that it was better.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((self.best / REPORT).read_text(encoding="utf-8"))
            if score(values) <= score(kept):
                return
        text = {REPORT: json.dumps({"step": step, "best_by": by, **values}, indent=1) + "\n"}
        if self.model.adapter is not None:
            dtype = files_of(self.config)["dtype"]
            write_result(self.best, text, save_adapter, self.model, dtype=dtype)
        else:
            write_result(self.best, text, save_model, self.model, **files_of(self.config))


def evaluation_text(values: dict[str, Any]) -> str:
    """Describe an evaluation's values in a line."""
    parts = loss_text(values)
    for name, count in values.items():
        if name.endswith("/problems"):
            task = name.split("/")[1]
            accuracy = values[f"evaluation/{task}/accuracy"]
            parts.append(f"{task} accuracy {accuracy:.3f} of {count} problems")
    if "evaluation/tokens_per_forward" in values:
        parts.append(f"{values['evaluation/tokens_per_forward']:.2f} tokens a forward")
    return ", ".join(parts)


def jobs(model: DiffusionModel, config: TrainConfig) -> list[tuple[Task, list[Problem], Decoder]]:
    """Draw each task's problems and choose its decoder. model: as trained; no weights are read.
    Raises InputError for a decoder or option that there is not, or that does not fit the model, and
    for a problem longer than its context."""
    settings = config.evaluation
    if "max_new_tokens" in settings.options:
        raise InputError("evaluation.options: max_new_tokens is that of each task, leave it out")
    chosen, found = DecoderSettings(settings.decoder, settings.options), []
    for task in settings.chosen(tuple(config.data.tasks or ())):
        try:
            decoder = chosen.for_task(model, task)
            decoder.check(model.contract)
        except InputError as error:
            raise InputError(f"evaluation: {error}") from error
        count, seed = settings.problems, config.seed
        problems = draw_problems(task, settings.split, count, seed, "evaluation.problems")
        encode_problems(model, problems, decoder, " of the evaluation")
        found.append((task, problems, decoder))
    return found


@contextlib.contextmanager
def undisturbed(model: DiffusionModel) -> Iterator[None]:
    """Decode without dropout; restore the mode and torch's random state afterwards."""
    network = model.adapter or model.backbone
    training = network.training
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        network.eval()
        try:
            yield
        finally:
            network.train(training)
