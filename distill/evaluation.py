"""Evaluate a model while it trains: decode held-out problems, take a held-out loss, keep the best.

Imported only where a run evaluates: beside rollouts it is the one place where training decodes. It
changes nothing that training sees: modules' modes and torch's random state are as they were.

The held-out loss is the cross-entropy of masked answers, and the KL to the teacher, on samples that
are never trained on, under the same masks in every evaluation. Each sample is fed once for each
mask ratio r of `evaluation.loss_ratios`, its response tokens masked with probability r, and read
under the student's spans. Of the masked answer tokens (the tail of end tokens behind them is fed
and not counted)

    cross-entropy(r) = mean of -log p(token),   kl(r) = mean of KL(teacher || student)

in nats a masked token; the mean over the ratios is the loss itself. The masks of a sample come from
one draw for all ratios, so that what a lower ratio hides a higher one hides too:

    r = 0.3    a b M d e f
    r = 0.7    a M M d M M
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor

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
from distill.data.samples import HeldOut, Placed, Sample
from distill.export import as_trained, files_of, write_result
from distill.objectives.base import Objective, gathered, weighted_cross_entropy
from distill.sharding import has_whole_weights, uncompiled
from triton_kernels.masked_kl import masked_linear_kl

REPORT = "evaluation.json"
Sums = NDArray[np.float64]


class Evaluator:
    """Decode the same problems each time, greedily unless the options say otherwise, take the
    held-out loss where there is one, and keep in ``best/`` the best result by `TrainConfig.best_by`
    (of equal accuracy the faster, of equals the first).

    Raises InputError before any work for an unknown task, decoder or option, a decoder that does
    not fit the model, a problem longer than its context, or weights that are split over processes.
    """

    def __init__(
        self, objective: Objective, held_out: HeldOut | None, accelerator: Accelerator
    ) -> None:
        if not has_whole_weights(accelerator):
            raise InputError(
                "eval_every evaluates on one process, whose weights must be whole: expected one "
                f"process, DDP or ZeRO-2, got {accelerator.distributed_type.value}"
            )
        self.config, self.accelerator = objective.config, accelerator
        self.loss = None if held_out is None else HeldoutLoss(objective, held_out)
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
    parts = []
    for name, words in (("cross_entropy", "cross-entropy"), ("kl", "KL")):
        value, error = (values.get(f"evaluation/{name}{end}") for end in ("", "_stderr"))
        if value is not None:
            parts.append(f"{words} {value:.4f}" + ("" if error is None else f" ± {error:.4f}"))
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


class HeldoutLoss:
    """Measure an objective's model on samples that are held out.

    Raises InputError, before any weight is read, for a ratio that masks none of their tokens.
    """

    def __init__(self, objective: Objective, held_out: HeldOut):
        config = objective.config
        self.objective = objective
        self.batch_size = config.evaluation.batch_size
        # The samples of a forward are of like length, and one that needs too much memory is first.
        self.samples = sorted(held_out.samples, key=len, reverse=True)
        self.names = ["cross_entropy", *(["kl"] if config.objective.has_teacher else [])]
        self.ratios: tuple[float | None, ...] = (None,)
        self._shares: dict[str, tuple[float, float]] = {}
        if config.objective.masks_by_ratio:
            self.ratios = config.evaluation.loss_ratios
        for ratio in self.ratios:
            tried = objective.for_held_out(ratio, len(self.samples[0]))
            if ratio and not any(tried.draw(s)[1].any() for s in self.samples):
                raise InputError(
                    f"evaluation.loss_ratios: {ratio} masks no token of the held-out samples "
                    f"({held_out.said}): expected higher ratios or more samples"
                )

    def measure(self) -> dict[str, float]:
        """Return values for the log by name: of each loss the mean over the ratios, each ratio's
        own, and their standard errors over samples (where there are two)."""
        sums = {name: np.zeros((len(self.samples), len(self.ratios))) for name in self.names}
        self._shares.clear()
        tokens = np.zeros((len(self.samples), len(self.ratios)))
        for first in range(0, len(self.samples), self.batch_size):
            part = slice(first, first + self.batch_size)
            for r, ratio in enumerate(self.ratios):
                found = self._sums(self.samples[part], ratio)
                tokens[part, r] = found.pop("tokens")
                for name, by_sample in found.items():
                    sums[name][part, r] = by_sample
        values: dict[str, float] = {}
        for name in self.names:
            values |= summary(f"evaluation/{name}", sums[name], tokens, self.ratios)
        for name, (some, of) in self._shares.items():
            values[f"evaluation/{name}"] = some / max(of, 1.0)
        return values

    @torch.no_grad()
    def _sums(self, samples: list[Sample], ratio: float | None) -> dict[str, Sums]:
        """Count each sample's masked answer tokens and sum their losses, ``[samples]`` each."""
        objective = self.objective.for_held_out(ratio, len(samples[0]))
        model = objective.model
        # Put one sample into a row, so that the row says which sample a masked token is of.
        rows = [[Placed(sample, 0)] for sample in samples]
        batch = objective.batch(rows, slice(0, len(rows))).to(model.device)
        counted = objective.counted(batch)  # [N]
        owner = batch.rows // batch.input_ids.shape[1]  # [N]
        teacher = objective.read_teacher(batch) if "kl" in self.names else None
        student = objective.read(batch, batch.spans)  # [N, C]
        head = gathered(model.backbone.lm_head.weight)
        found: dict[str, list[Tensor]] = {name: [] for name in ("tokens", *self.names)}
        for i in range(len(samples)):
            mine = counted & (owner == i)
            ones = mine[mine].float()
            found["tokens"].append(ones.sum())
            logits = model.head(student[mine])
            found["cross_entropy"].append(weighted_cross_entropy(logits, batch.targets[mine], ones))
            if teacher is not None:
                found["kl"].append(masked_linear_kl(student[mine], teacher[mine], head, ones))
        for name, (some, of) in objective.held_out_shares(batch, student, teacher).items():
            before = self._shares.get(name, (0.0, 0.0))
            self._shares[name] = before[0] + some, before[1] + of
        return {name: torch.stack(values).double().cpu().numpy() for name, values in found.items()}


def summary(
    name: str, sums: Sums, tokens: Sums, ratios: tuple[float | None, ...]
) -> dict[str, float]:
    """Return means a token by ratio and over the ratios, each with its standard error, by name.

    sums, tokens: ``[samples, ratios]``. A mean is a ratio of two sums over samples, s_i and n_i;
    its error is that of the mean of the residuals (s_i - mean n_i) / sum of n (the linearised
    estimator of survey sampling), in which a sample's ratios are one draw.
    """
    mean = sums.sum(0) / tokens.sum(0)
    residual = (sums - mean * tokens) / tokens.sum(0)
    values = {name: float(mean.mean())}
    by_ratio = [(r, ratio) for r, ratio in enumerate(ratios) if ratio is not None]
    values |= {f"{name}/{ratio}": float(mean[r]) for r, ratio in by_ratio}
    if len(sums) > 1:
        scale = len(sums) / (len(sums) - 1)
        error = np.sqrt(scale * (residual**2).sum(0))
        values[f"{name}_stderr"] = float(np.sqrt(scale * (residual.mean(1) ** 2).sum()))
        values |= {f"{name}_stderr/{ratio}": float(error[r]) for r, ratio in by_ratio}
    return values
