"""Evaluation while a model trains: held-out problems decoded as a user would, a held-out loss, the
best result kept.

The one place besides rollouts where training decodes. It changes nothing that training sees:
modules' modes and torch's random state are as they were.
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
from accelerate.utils import DistributedType

from d2f.checkpoint import parse
from d2f.errors import InputError
from d2f.files import put_back
from d2f.model import DiffusionModel
from d2f.tasks import Problem, Task
from decode.cli import DecoderSettings
from decode.decoders import Decoder, find_decoder
from decode.evaluate import decode_and_judge
from decode.jobs import draw_problems, encode_problems, give_notices
from distill.config import TrainConfig
from distill.export import as_trained, write_result
from distill.heldout_loss import HeldoutLoss, loss_text
from distill.sharding import as_they_are

REPORT = "evaluation.json"


class Evaluator:
    """Decodes the same problems each time, greedily unless the options say otherwise, takes the
    held-out loss, where there is one, and keeps the best result by `TrainConfig.best_by` (of equal
    accuracy the faster, of equals the first) in ``best/``.

    Raises InputError before any work for an unknown task, decoder or option, a decoder that does
    not fit the model, a problem longer than its context, or weights that are split over processes.
    """

    def __init__(
        self,
        model: DiffusionModel,
        config: TrainConfig,
        accelerator: Accelerator,
        loss: HeldoutLoss | None = None,
    ):
        settings = config.evaluation
        if not _has_whole_weights(accelerator):
            raise InputError(
                "eval_every evaluates on one process, whose weights must be whole: expected one "
                f"process, DDP or ZeRO-2, got {accelerator.distributed_type.value}"
            )
        self.config, self.settings, self.loss = config, settings, loss
        self.accelerator = accelerator
        self.model = as_trained(model, config)
        self.best = Path(config.output) / "best"
        # Encoded and checked once: every evaluation decodes the same prompts.
        self.jobs = jobs(self.model, config)
        if accelerator.is_main_process:
            give_notices(task for task, _, _ in self.jobs)

    def due(self, step: int) -> bool:
        """Whether a step, counted from 1, ends with an evaluation."""
        assert self.config.eval_every is not None
        return step % self.config.eval_every == 0 or step == self.config.steps

    def run(self, step: int) -> dict[str, Any]:
        """Measure, keep the best: values for the log and the tracker by name."""
        values: dict[str, Any] = {}
        with undisturbed(self.model), as_they_are(self.model.backbone):
            if self.jobs:
                values |= self._decode()
            if self.loss is not None:
                with self.accelerator.autocast():  # as training computes
                    values |= self.loss.measure()
        self._keep(step, values)
        return values

    def _decode(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        right = tokens = forwards = count = 0
        for task, problems, decoder in self.jobs:
            judged = decode_and_judge(
                self.model, decoder, task, problems, batch_size=self.settings.batch_size
            )
            right, count = right + sum(judged.right), count + len(problems)
            tokens += sum(len(result.tokens) for result in judged.results)
            forwards += sum(result.forwards for result in judged.results)
            values[f"evaluation/{task.name}/accuracy"] = sum(judged.right) / len(problems)
            verdict = "right" if judged.right[0] else "wrong"
            values[f"evaluation/{task.name}/example"] = (
                f"{problems[0].question}\n{judged.results[0].text}\n({verdict})"
            )
        values["evaluation/accuracy"] = right / count
        values["evaluation/tokens_per_forward"] = tokens / forwards
        return values

    def _keep(self, step: int, values: dict[str, Any]) -> None:
        by = self.config.best_by
        score = score_of(by, values)
        # A kill while the folder was replaced may have left the old one under another name.
        put_back(self.best)
        if not all(map(math.isfinite, score)):
            return
        # A report that is missing or damaged says of nothing that it was better.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = parse((self.best / REPORT).read_text(encoding="utf-8"), nan=True)
            if score <= score_of(by, kept):
                return
        report = json.dumps({"step": step, "best_by": by, **values}, indent=1) + "\n"
        write_result(self.model, self.config, self.best, {REPORT: report})


def score_of(by: str, values: dict[str, Any]) -> list[float]:
    """What a better evaluation has more of, compared as a list: accuracy and, where that is equal,
    tokens a forward; or a loss the other way round."""
    if by == "accuracy":
        return [values["evaluation/accuracy"], values["evaluation/tokens_per_forward"]]
    return [-values[f"evaluation/{by}"]]


def said(values: dict[str, Any]) -> str:
    """An evaluation's values in a line."""
    parts = loss_text(values)
    if "evaluation/accuracy" in values:
        rate = values["evaluation/tokens_per_forward"]
        parts.append(f"accuracy {values['evaluation/accuracy']:.3f}")
        parts.append(f"{rate:.2f} tokens a forward")
    return ", ".join(parts)


def jobs(model: DiffusionModel, config: TrainConfig) -> list[tuple[Task, list[Problem], Decoder]]:
    """What is decoded of each task, and how. model: as trained; no weights are read. Raises
    InputError for a decoder or option that there is not, or that does not fit the model, and for a
    problem longer than its context."""
    settings, chosen = config.evaluation, _decoder_settings(config)
    found = []
    for task in settings.chosen(tuple(config.data.tasks or ())):
        try:
            decoder = chosen.for_task(model, task)
            decoder.check(model.contract)
        except InputError as error:
            raise InputError(f"evaluation.options: {error}") from error
        count, seed = settings.problems, config.seed
        problems = draw_problems(task, settings.split, count, seed, "evaluation.problems")
        encode_problems(model, problems, decoder, " of the evaluation")
        found.append((task, problems, decoder))
    return found


def _decoder_settings(config: TrainConfig) -> DecoderSettings:
    """The decoder that the configuration asks for. Raises InputError."""
    settings = config.evaluation
    if settings.decoder is not None:
        try:
            find_decoder(settings.decoder)
        except InputError as error:
            raise InputError(f"evaluation.{error}") from error
    if "max_new_tokens" in settings.options:
        raise InputError("evaluation.options: max_new_tokens is that of each task, leave it out")
    return DecoderSettings(settings.decoder, settings.options)


def _has_whole_weights(accelerator: Accelerator) -> bool:
    """Whether each process holds all weights."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return bool(accelerator.state.deepspeed_plugin.zero_stage < 3)
    return bool(accelerator.distributed_type != DistributedType.FSDP)


@contextlib.contextmanager
def undisturbed(model: DiffusionModel) -> Iterator[None]:
    """Modules in evaluation mode; afterwards their modes and torch's random state as before."""
    network = model.adapter or model.backbone
    modes = {module: module.training for module in network.modules()}
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        # No dropout while decoding; each module's own mode is put back afterwards.
        network.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
