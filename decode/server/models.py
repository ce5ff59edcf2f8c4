"""Load models with their engines, and choose the decoders that requests may ask for."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import transformers

from d2f.command import say
from d2f.contract import Contract
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.cli import DecoderSettings, checked_outline, load, option_names, read_settings
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder, qualified_name
from decode.decoders.base import common_options
from decode.engine.async_engine import AsyncEngine
from decode.engine.likelihood import ROWS
from decode.server.options import Options

Kind = type[Decoder]
SHARED = (*common_options(), "max_new_tokens", "stop")  # options of every decoder


@dataclass(eq=False)
class ServedModel:
    """Hold one model with its engine."""

    name: str
    model: DiffusionModel
    engine: AsyncEngine
    default: Kind  # the decoder of a request that names none
    decoders: Mapping[str, Kind]  # those that it may name
    given: Mapping[str, Any]  # by the operator; what not every decoder has is the default one's
    context_length: int  # most tokens of a prompt and its response together
    sanitize: bool = False  # what looks like control tokens in a chat's text is plain text
    created: int = field(default_factory=lambda: int(time.time()))
    # One request's prompts at a time: tokenizers are not for several threads.
    preparing: Executor = field(default_factory=partial(ThreadPoolExecutor, 1))

    def options(self, kind: Kind) -> dict[str, Any]:
        """Return the operator's options of a decoder."""
        names = option_names(kind) if kind is self.default else SHARED
        return {name: value for name, value in self.given.items() if name in names}

    @cached_property
    def most_characters(self) -> float:
        """Characters of a context full of the longest token, as vLLM counts them: no longer text
        can fit."""
        tokenizer: Any = self.model.tokenizer
        longest = math.inf if tokenizer is None else max(map(len, tokenizer.get_vocab()))
        return self.context_length * longest


def serve_model(
    name: str,
    model: DiffusionModel,
    engine: AsyncEngine,
    settings: DecoderSettings,
    options: Options,
) -> ServedModel:
    """Put a model under a name, with the operator's decoder settings. Raises InputError."""
    contract = model.contract
    default = choose_default(contract, settings)
    allowed = options.allowed
    kinds = DECODERS.values() if allowed is None else map(find_decoder, allowed)
    decoders = {qualified_name(kind): kind for kind in (default, *kinds) if fits(kind, contract)}
    context = min(model.context_length, options.max_model_len or model.context_length)
    served = ServedModel(
        name, model, engine, default, decoders, settings.given, context, options.sanitize_content
    )
    default(**default.with_model_defaults(served.options(default), contract)).check(contract)
    return served


def choose_default(contract: Contract, settings: DecoderSettings) -> Kind:
    """Return the decoder that the operator named, where it decodes models like this one, otherwise
    the one that such a model has by default."""
    kind = None if settings.name is None else find_decoder(settings.name)
    return kind if kind is not None and fits(kind, contract) else default_decoder(contract)


def fits(kind: Kind, contract: Contract) -> bool:
    """Tell whether a decoder decodes models of that contract."""
    try:
        kind(**kind.with_model_defaults({}, contract)).check(contract)
    except InputError:
        return False
    return True


def check_models(options: Options) -> None:
    """Raise InputError where the models, read without their weights, do not fit the options."""
    takes = inspect.signature(transformers.PreTrainedTokenizerBase.apply_chat_template).parameters
    if options.sanitize_content and "sanitize_control_tokens" not in takes:
        raise InputError(
            f"--sanitize-content needs transformers 5.23, got {transformers.__version__}"
        )
    named = (replace(options, model=name) for name in options.named.values())
    check_settings([checked_outline(one) for one in named], read_settings(options))


def check_settings(models: Sequence[DiffusionModel], settings: DecoderSettings) -> None:
    """Raise InputError where no model would be decoded with what the operator says."""
    kinds = [choose_default(model.contract, settings) for model in models]
    if settings.name is not None and find_decoder(settings.name) not in kinds:
        raise InputError(f"the decoder {settings.name} fits none of the models")
    own = [name for name in settings.given if name not in SHARED]
    if own and not any(set(own) <= set(option_names(kind)) for kind in kinds):
        raise InputError(
            f"none of the models is decoded by default with the options {', '.join(own)}: expected "
            "some of one decoder, named by --decoder"
        )


def load_models(options: Options) -> list[ServedModel]:
    """Load all models of a command line and start their engines. Raises InputError."""
    settings, longest, models = read_settings(options), options.max_model_len, []
    for alias, name in options.named.items():
        say(f"loading {name}")
        model, _ = load(replace(options, model=name))
        if longest is not None and longest > model.context_length:
            say(f"notice: {alias} has a context of {model.context_length}, which holds")
        engine = AsyncEngine(
            model,
            batch_size=options.max_batch,
            slots=options.slots,
            request_slots=options.request_slots or most_slots(model, longest),
            max_waiting=options.max_waiting,
            max_rows=options.max_rows,
            prefill_rows=options.prefill_rows,
            reuse_prefixes=options.reuse_prefixes,
        )
        models.append(serve_model(alias, model, engine, settings, options))
    return models


def most_slots(model: DiffusionModel, max_model_len: int | None) -> int:
    """Choose how many slots a request may need: enough for the longest one with FreeDave's four
    states and for its likelihoods, so that no client's thousand drafts hold up all others."""
    longest = min(model.context_length, max_model_len or model.context_length)
    return max(4 * (longest + 1), longest + ROWS)
