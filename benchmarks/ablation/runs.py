"""One run of an ablation: train, decode held-out problems, keep both; and what is kept so far.

What is trained already by the same configuration is not trained again, what is measured already of
the same weights not measured again, here or by a report that is there (`Reported`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ablation.ablation_config import Ablation, Decoding, Run
from benchmarks.ablation.reported import Reported
from d2f.errors import InputError
from d2f.files import locked, write_beside
from d2f.quiet import quiet
from d2f.tasks import Task
from distill.config import TrainConfig

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

MEASURED = "measured.json"


def carry_out(ablation: Ablation, run: Run, reported: Reported) -> dict[str, Any]:
    """Train and measure what is left of a run; what `found` says of it then. Raises InputError
    where its folder has a run of another configuration, or where it was stopped."""
    from distill.checkpoint import RunFolder
    from distill.train import train

    with quiet(), locked(run.folder):
        if run.config is not None and run.seed is not None:
            folder = RunFolder(run.config, extend=False)
            if _is_trained(run):
                folder.check_inputs()  # a student of another teacher is none of this ablation
            else:
                train(run.config)
            if not _is_trained(run):
                raise InputError(f"{run.folder}: stopped before its end; the same command goes on")
        measure(ablation, _model(run), run.decode, run.folder, reported.rows(run))
        done = found(ablation, run, reported)
    assert done is not None
    return done


def found(ablation: Ablation, run: Run, reported: Reported) -> dict[str, Any] | None:
    """What a run's folder, or the report where no folder has it, has of this ablation, None where
    that is nothing: what was trained, and a row for each decoding and task that was measured.
    Nothing is decoded. Raises InputError where it is a run of another configuration."""
    from benchmarks.make_models import hours
    from distill.checkpoint import RunFolder

    about = {"variant": run.variant, "setting": run.setting, "seed": run.seed}
    trained: dict[str, Any] = {}
    if run.config is not None and run.seed is not None:
        folder = RunFolder(run.config, extend=False)
        if not _is_trained(run):
            entry = reported.trained(run, folder)
            rows = _asked_rows(ablation, run, entry["rows"]) if entry is not None else []
            return {**entry, "rows": rows} if entry is not None and rows else None
        folder.check_inputs()
        log = [json.loads(line) for line in folder.log.read_text().splitlines()]
        trained = {
            "steps": log[-1]["step"],
            "samples": log[-1]["samples"],
            "loss": log[-1]["loss"],
            "seconds": 3600 * hours(log),
            "training": run.config.model_dump(mode="json", exclude={"output"}),
            "inputs": folder.inputs,
        }
    known = reported.rows(run)
    if not known and not is_kept(run):
        return None
    rows = measure(ablation, _model(run), run.decode, run.folder, known, decode=False)
    return {**about, **trained, "rows": rows} if rows else None


def is_kept(run: Run) -> bool:
    """Whether its folder has anything that was measured, of whatever problems and decodings."""
    return (run.folder / MEASURED).is_file()


def is_whole(ablation: Ablation, run: Run, reported: Reported) -> bool:
    """Whether nothing of it is left to do. Raises InputError as `found` does."""
    done = found(ablation, run, reported)
    return done is not None and len(done["rows"]) == len(run.decode) * len(ablation.chosen)


def measure(
    ablation: Ablation,
    model: DiffusionModel,
    decodings: Sequence[Decoding],
    folder: Path,
    reported: Sequence[dict[str, Any]] = (),
    *,
    decode: bool = True,
) -> list[dict[str, Any]]:
    """What decode.evaluate says of each decoding and task, kept in `folder`. reported: rows that
    are known besides. decode: False takes what is there already and leaves out the rest. Raises
    InputError."""
    from decode.cli import DecoderSettings, weights_hash
    from decode.evaluate import evaluate
    from decode.report import environment

    path = folder / MEASURED
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    weights = weights_hash(model)
    model.merge_adapter()
    measured = []
    for decoding in decodings:
        chosen = DecoderSettings(decoding.decoder, decoding.options)
        for task in ablation.chosen:
            asked = {"weights": weights, **_asked(ablation, decoding, task)}
            # Of before answers were kept by problem: to be measured again.
            known = (
                k
                for k in (*kept, *reported)
                if asked.items() <= k.items() and "right_by_problem" in k
            )
            judged = next(known, None)
            if judged is None and decode:
                decoder = chosen.for_task(model, task)
                decoder.check(model.contract)
                judged = evaluate(
                    model, decoder, task, ablation.problems,
                    split=ablation.split, batch_size=ablation.batch_size,
                )  # fmt: skip
                judged = judged | asked | {"environment": environment(model)}
                kept.append(judged)
                write_beside(path, json.dumps(kept) + "\n")
            if judged is not None:
                measured.append(judged | {"decoding": decoding.name})
    return measured


def _asked(ablation: Ablation, decoding: Decoding, task: Task) -> dict[str, Any]:
    """What a row is of, beside the weights."""
    return {
        "batch_size": ablation.batch_size,
        "decoder": decoding.decoder,
        "options": decoding.options,
        "task": task.name,
        "identity": task.identity,
        "split": ablation.split,
        "problems": ablation.problems,
    }


def _asked_rows(
    ablation: Ablation, run: Run, rows: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Those of a report that are what the ablation asks of a run."""
    found = []
    for decoding in run.decode:
        for task in ablation.chosen:
            asked = _asked(ablation, decoding, task).items()
            known = (r for r in rows if asked <= r.items() and "right_by_problem" in r)
            found += [row | {"decoding": decoding.name} for row in [next(known, None)] if row]
    return found


def _is_trained(run: Run) -> bool:
    return (run.folder / "model" / "config.json").is_file()


def _model(run: Run) -> DiffusionModel:
    """The model of a run in fp32: what its training made, what that would start from, or the one
    that it names."""
    import d2f

    if run.config is None:
        assert run.model is not None
        return d2f.load(run.model, dtype="float32")
    if run.seed is not None:
        return d2f.load(str(run.folder / "model"), dtype="float32")
    return untrained(run.config)


def untrained(config: TrainConfig) -> DiffusionModel:
    """The model that a training starts from, decoded as its result would be: for objective d2f a
    bidirectional teacher under the block-causal mask of its student."""
    import torch

    from distill.export import prepare_model

    model = prepare_model(config, base_dtype=torch.float32)
    model.contract = replace(model.contract, **config.objective.contract())
    return model
