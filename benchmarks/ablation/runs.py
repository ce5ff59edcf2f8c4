"""One run of an ablation, in a process of its own: train, decode held-out problems, keep both.

What is trained already by the same configuration is not trained again, what is measured already of
the same weights not measured again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablation.ablation_config import Ablation, Decoding, Untrained, Variant
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.locks import locked
from distill.config import TrainConfig

MEASURED = "measured.json"


def train_and_measure(ablation: Ablation, variant: Variant, config: TrainConfig) -> dict[str, Any]:
    """A variant's run: its last logged loss, seconds and what was measured of it. Raises InputError
    where its folder has a run of another configuration, or where it was stopped."""
    from distill.make_models import hours
    from distill.run.run_folder import RunFolder
    from distill.train import train

    with locked(Path(config.output)):
        folder = RunFolder(config, extend=False).place
        if not (folder / "model" / "config.json").is_file():
            train(config)
        if not (folder / "model" / "config.json").is_file():
            raise InputError(f"{folder}: stopped before its end; the same command goes on")
        measured = measure(ablation, str(folder / "model"), ablation.decodings(variant), folder)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        "variant": variant.name,
        "seed": config.seed,
        "steps": log[-1]["step"],
        "samples": log[-1]["samples"],
        "loss": log[-1]["loss"],
        "seconds": 3600 * hours(log),
        "rows": measured,
    }


def measure_untrained(ablation: Ablation, entry: Untrained, folder: Path) -> dict[str, Any]:
    """What was measured of a model as it is, kept in `folder`."""
    with locked(folder):
        measured = measure(ablation, entry.model, entry.decode, folder)
    return {"variant": entry.name, "rows": measured}


def measure(
    ablation: Ablation, model_name: str, decodings: Sequence[Decoding], folder: Path
) -> list[dict[str, Any]]:
    """What decode.evaluate says of each decoding and task. Raises InputError."""
    import transformers

    import d2f
    from decode.commands.decoder_settings import DecoderSettings
    from decode.commands.load_model import weights_hash
    from decode.evaluation.evaluate_task import evaluate
    from decode.reporting.environment import environment

    path = folder / MEASURED
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    transformers.logging.disable_progress_bar()
    model = d2f.load(model_name, dtype="float32")
    weights = weights_hash(model)
    model.merge_adapter()
    measured = []
    for decoding in decodings:
        chosen = DecoderSettings(decoding.decoder, decoding.options)
        for task in ablation.chosen:
            asked = {
                "weights": weights,
                "batch_size": ablation.batch_size,
                "decoder": decoding.decoder,
                "options": decoding.options,
                "task": task.name,
                "identity": task.identity,
                "split": ablation.split,
                "problems": ablation.problems,
            }
            found = next((k for k in kept if asked.items() <= k.items()), None)
            if found is None:
                decoder = chosen.for_task(model, task)
                decoder.check(model.contract)
                judged = evaluate(
                    model, decoder, task, ablation.problems,
                    split=ablation.split, batch_size=ablation.batch_size,
                )  # fmt: skip
                found = judged | asked | {"environment": environment(model)}
                kept.append(found)
                write_beside(path, json.dumps(kept) + "\n")
            measured.append(found | {"decoding": decoding.name})
    return measured
