"""The models of a command line, each with an engine."""

from __future__ import annotations

import argparse

from d2f.model import DiffusionModel
from decode.commands.decoder_settings import DecoderSettings
from decode.commands.load_model import check_options, load, outline
from decode.commands.run_command import say
from decode.commands.serve_flags import of_model
from decode.engine.async_engine import AsyncEngine
from decode.engine.likelihood import ROWS
from decode.server.served_model import ServedModel, check_settings, serve_model


def check_models(options: argparse.Namespace, settings: DecoderSettings) -> None:
    """Raise InputError for what can be known to be wrong before anything is read."""
    length = settings.given.get("max_new_tokens")
    settings.check([1 if length is None else length])
    for name in options.model.values():
        check_options(of_model(options, name))


def check_outlines(options: argparse.Namespace, settings: DecoderSettings) -> None:
    """Raise InputError where the models, read without their weights, do not fit the options."""
    models = [outline(name, options.adapter, options.family) for name in options.model.values()]
    check_settings(models, settings)


def load_models(options: argparse.Namespace, settings: DecoderSettings) -> list[ServedModel]:
    """Load all of them, and start their engines. Raises InputError."""
    loaded = {}
    for alias, name in options.model.items():
        say(f"loading {name}")
        loaded[alias], _ = load(of_model(options, name))
    check_settings([*loaded.values()], settings)
    models = []
    for alias, model in loaded.items():
        longest = options.max_model_len
        if longest is not None and longest > model.context_length:
            say(f"notice: {alias} has a context of {model.context_length}, which holds")
        engine = AsyncEngine(
            model,
            batch_size=options.max_batch,
            slots=options.slots,
            request_slots=options.request_slots or most_slots(model, longest),
            max_waiting=options.max_waiting,
            prefill_rows=options.prefill_rows,
            reuse_prefixes=options.reuse_prefixes,
        )
        models.append(
            serve_model(
                alias,
                model,
                engine,
                settings,
                allowed=options.allow_decoders,
                max_model_len=longest,
            )
        )
    return models


def most_slots(model: DiffusionModel, max_model_len: int | None) -> int:
    """Most slots of a request, where nobody says: enough for the longest one with FreeDave's four
    states and for its likelihoods. Else one client's thousand drafts would hold up all others."""
    longest = min(model.context_length, max_model_len or model.context_length)
    return max(4 * (longest + 1), longest + ROWS)
