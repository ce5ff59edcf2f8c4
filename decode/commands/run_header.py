"""What decides a run's results: the first line of its file of results."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from d2f import __version__
from d2f.model import DiffusionModel
from decode.commands.prompt_jobs import PromptJob, prompts_hash
from decode.decoders import spelled


def header(
    options: argparse.Namespace, model: DiffusionModel, weights: str, jobs: list[PromptJob]
) -> dict[str, Any]:
    """What decides a run's results: the resolved settings, and the hashes of weights and prompts.
    max_new_tokens and stop of the decoder are null where they differ between prompts."""
    decoder = asdict(jobs[0].decoder)
    for name in ("max_new_tokens", "stop"):
        if len({getattr(job.decoder, name) for job in jobs}) > 1:
            decoder[name] = None
    return {
        **model_header(options, model, weights),
        "batch_size": options.batch_size,
        "decoder": spelled(type(jobs[0].decoder)),
        "options": decoder,
        "prompts": prompts_hash(jobs),
        "count": len(jobs),
    }


def model_header(
    options: argparse.Namespace, model: DiffusionModel, weights: str
) -> dict[str, Any]:
    """What decides a run's results of its model."""
    return {
        "version": __version__,
        "model": options.model,
        "adapter": options.adapter,
        "merged": options.adapter is not None and options.merge,
        "weights": weights,
        "family": model.family,
        "dtype": short_dtype(model),
        "device": model.device.type,
    }


def short_dtype(model: DiffusionModel) -> str:
    """As float32, or with quantised weights as float32 int8."""
    return model.precision
