"""Models with their engines, the decoders that requests may ask for, and the operator's limits."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from anyio import CapacityLimiter

from d2f.command import say
from d2f.contract import Contract
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.cli import DecoderSettings, check_options, load, option_names, outline
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder, qualified_name
from decode.decoders.base import common_options
from decode.engine.async_engine import AsyncEngine
from decode.engine.likelihood import ROWS
from decode.server.options import Options

Kind = type[Decoder]
SHARED = (*common_options(), "max_new_tokens", "stop")  # options of every decoder


@dataclass(eq=False)
class ServedModel:
    """One model with its engine.

    default: the decoder of a request that names none. decoders: those that it may name. given: the
    operator's options; those that not every decoder has hold for the default one alone.
    context_length: most tokens of a prompt and its response together. sanitize: whether text of a
    chat that looks like control tokens is encoded as plain text. preparing: lets one request's
    prompts be encoded at a time, beside the event loop.
    """

    name: str
    model: DiffusionModel
    engine: AsyncEngine
    default: Kind
    decoders: Mapping[str, Kind]
    given: Mapping[str, Any]
    context_length: int
    sanitize: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    preparing: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(1))

    def options(self, kind: Kind) -> dict[str, Any]:
        """Return the operator's options of a decoder."""
        names = option_names(kind) if kind is self.default else SHARED
        return {name: value for name, value in self.given.items() if name in names}

    @cached_property
    def most_characters(self) -> int | None:
        """Characters of a context full of the longest token, as vLLM counts them: no longer text
        can fit. None without a tokenizer."""
        tokenizer: Any = self.model.tokenizer
        if tokenizer is None:
            return None
        return self.context_length * max(map(len, tokenizer.get_vocab()))


def serve_model(
    name: str,
    model: DiffusionModel,
    engine: AsyncEngine,
    settings: DecoderSettings | None = None,
    *,
    allowed: Sequence[str] | None = None,
    max_model_len: int | None = None,
    sanitize: bool = False,
) -> ServedModel:
    """Put a model under a name, with the operator's decoder settings. Raises InputError.

    allowed: decoders that requests may ask for, besides the default one; None for all that fit.
    """
    settings = settings or DecoderSettings(None, {})
    contract = model.contract
    default = choose_default(contract, settings)
    kinds = DECODERS.values() if allowed is None else [find_decoder(name) for name in allowed]
    decoders = {qualified_name(kind): kind for kind in (default, *kinds) if fits(kind, contract)}
    context = min(model.context_length, max_model_len or model.context_length)
    served = ServedModel(name, model, engine, default, decoders, settings.given, context, sanitize)
    default(**default.with_model_defaults(served.options(default), contract)).check(contract)
    return served


def choose_default(contract: Contract, settings: DecoderSettings) -> Kind:
    """Return the decoder that the operator named, where it decodes models like this one, otherwise
    the one that such a model has by default."""
    if settings.name is not None:
        kind = find_decoder(settings.name)
        if fits(kind, contract):
            return kind
    return default_decoder(contract)


def fits(kind: Kind, contract: Contract) -> bool:
    """Tell whether a decoder decodes models of that contract."""
    try:
        kind(**kind.with_model_defaults({}, contract)).check(contract)
    except InputError:
        return False
    return True


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


def check_models(options: Options, settings: DecoderSettings) -> None:
    """Raise InputError for what is wrong before anything is read."""
    settings.check([1])
    for name in options.named.values():
        check_options(replace(options, model=name))


def check_outlines(options: Options, settings: DecoderSettings) -> None:
    """Raise InputError where the models, read without their weights, do not fit the options."""
    models = [outline(name, options.adapter, options.family) for name in options.named.values()]
    check_settings(models, settings)


def load_models(options: Options, settings: DecoderSettings) -> list[ServedModel]:
    """Load all models of a command line and start their engines. Raises InputError."""
    loaded = {}
    for alias, name in options.named.items():
        say(f"loading {name}")
        loaded[alias], _ = load(replace(options, model=name))
    check_settings([*loaded.values()], settings)
    models = []
    longest = options.max_model_len
    for alias, model in loaded.items():
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
        models.append(
            serve_model(
                alias,
                model,
                engine,
                settings,
                allowed=options.allowed,
                max_model_len=longest,
                sanitize=options.sanitize_content,
            )
        )
    return models


def most_slots(model: DiffusionModel, max_model_len: int | None) -> int:
    """Return the default for most slots of a request: enough for the longest one with FreeDave's
    four states and for its likelihoods, so that no client's thousand drafts hold up all others."""
    longest = min(model.context_length, max_model_len or model.context_length)
    return max(4 * (longest + 1), longest + ROWS)


@dataclass(frozen=True)
class Settings:
    """The operator's limits and openings.

    max_body: bytes of a request, None for what the longest context needs. body_seconds: until all
    of it must have come. request_seconds: from its arrival until its answer must be decoded.
    send_seconds: until a client must have taken what it was sent. most_unsent: bytes of forwards
    (``"events": true``) that may wait for a client that does not read. most_choices: answers to one
    request, prompts times n. api_keys: one of them must come with a request, where there are some.
    public: which of /health, /ready and /metrics need none. allowed_hosts: what a Host header may
    say, without port; empty allows all. cors_origins: other sites whose pages may ask. log_prompts:
    write prompts into the log.
    """

    max_body: int | None = None
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    send_seconds: float = 30.0
    most_unsent: int = 16_000_000
    most_choices: int = 128
    api_keys: tuple[str, ...] = ()
    public: tuple[str, ...] = ("/health", "/ready")
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False


def settings_of(options: Options, *, address: str) -> Settings:
    """Read the settings of a command line. address: where the server listens; by default it may be
    called by its own names where only this machine reaches it, otherwise by any."""
    return Settings(
        max_body=options.max_body,
        body_seconds=options.body_timeout,
        request_seconds=options.request_timeout,
        send_seconds=options.send_timeout,
        most_unsent=options.max_unsent,
        most_choices=min(options.max_choices, options.max_batch + options.max_waiting),
        api_keys=options.api_key,
        public=options.public_paths,
        allowed_hosts=options.allowed_host or own_names(address),
        cors_origins=options.cors_origin,
        log_prompts=options.log_prompts,
    )


def own_names(address: str) -> tuple[str, ...]:
    """Return the names by which a server at this address may be called; ("*",) for any."""
    if not ipaddress.ip_address(address).is_loopback:
        return ("*",)
    own = f"[{address}]" if ":" in address else address
    return tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", own)))
