"""A model that is served, and which decoders a request may ask for."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from d2f.contract import Contract
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.cli import DecoderSettings, check_options, load, option_names, outline, say
from decode.decoders import DECODERS, Decoder, default_decoder, find_decoder, qualified_name
from decode.decoders.base import common_options
from decode.engine.async_engine import AsyncEngine
from decode.engine.likelihood import ROWS
from decode.server.options import Options

Kind = type[Decoder]
SHARED = (*common_options(), "max_new_tokens", "stop")  # options of every decoder


@dataclass(frozen=True, eq=False)
class ServedModel:
    """One model with its engine.

    default: the decoder of a request that names none. decoders: those that it may name. given: the
    operator's options; those that not every decoder has hold for the default one alone.
    context_length: most tokens of a prompt and its response together.
    """

    name: str
    model: DiffusionModel
    engine: AsyncEngine
    default: Kind
    decoders: Mapping[str, Kind]
    given: Mapping[str, Any]
    context_length: int
    created: int = field(default_factory=lambda: int(time.time()))

    def options(self, kind: Kind) -> dict[str, Any]:
        """The operator's options of a decoder."""
        names = option_names(kind) if kind is self.default else SHARED
        return {name: value for name, value in self.given.items() if name in names}


def choose_default(contract: Contract, settings: DecoderSettings) -> Kind:
    """The decoder that the operator named, where it decodes models like this one, else the one
    that such a model has by default."""
    if settings.name is not None:
        kind = find_decoder(settings.name)
        if fits(kind, contract):
            return kind
    return default_decoder(contract)


def fits(kind: Kind, contract: Contract) -> bool:
    """Whether a decoder decodes models of that contract."""
    try:
        kind(**kind.with_model_defaults({}, contract)).check(contract)
    except InputError:
        return False
    return True


def fitting(contract: Contract, default: Kind, allowed: Sequence[str] | None) -> dict[str, Kind]:
    """The decoders that requests may name, those that fit the model: of all in this package, or of
    the allowed ones; the default one is always among them."""
    kinds = DECODERS.values() if allowed is None else [find_decoder(name) for name in allowed]
    found = {qualified_name(kind): kind for kind in kinds if fits(kind, contract)}
    return {qualified_name(default): default, **found}


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


def serve_model(
    name: str,
    model: DiffusionModel,
    engine: AsyncEngine,
    settings: DecoderSettings | None = None,
    *,
    allowed: Sequence[str] | None = None,
    max_model_len: int | None = None,
) -> ServedModel:
    """A model under a name, with the operator's decoder settings. allowed: names of the decoders
    that requests may ask for, None for all that fit. Raises InputError."""
    settings = settings or DecoderSettings(None, {})
    default = choose_default(model.contract, settings)
    served = ServedModel(
        name,
        model,
        engine,
        default,
        fitting(model.contract, default, allowed),
        settings.given,
        min(model.context_length, max_model_len or model.context_length),
    )
    default(**default.with_model_defaults(served.options(default), model.contract)).check(
        model.contract
    )
    return served


# The models of a command line, each with an engine.


def check_models(options: Options, settings: DecoderSettings) -> None:
    """Raise InputError for what can be known to be wrong before anything is read."""
    length = settings.given.get("max_new_tokens")
    settings.check([1 if length is None else length])
    for name in options.named.values():
        check_options(replace(options, model=name))


def check_outlines(options: Options, settings: DecoderSettings) -> None:
    """Raise InputError where the models, read without their weights, do not fit the options."""
    models = [outline(name, options.adapter, options.family) for name in options.named.values()]
    check_settings(models, settings)


def load_models(options: Options, settings: DecoderSettings) -> list[ServedModel]:
    """Load all of them, and start their engines. Raises InputError."""
    loaded = {}
    for alias, name in options.named.items():
        say(f"loading {name}")
        loaded[alias], _ = load(replace(options, model=name))
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
                allowed=options.allowed,
                max_model_len=longest,
            )
        )
    return models


def most_slots(model: DiffusionModel, max_model_len: int | None) -> int:
    """Most slots of a request, where nobody says: enough for the longest one with FreeDave's four
    states and for its likelihoods. Else one client's thousand drafts would hold up all others."""
    longest = min(model.context_length, max_model_len or model.context_length)
    return max(4 * (longest + 1), longest + ROWS)


# What an operator decides of a server besides its models.

MEGABYTE = 1_000_000
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Settings:
    """Limits and openings.

    max_body: bytes of a request. body_seconds: until all of it must have come. request_seconds:
    from its arrival until all of its answer must be decoded. send_seconds: until a client must have
    taken what it was sent. most_unsent: bytes of forwards (``"events": true``) that may wait for a
    client that does not read. most_choices: answers to one request, prompts times n. api_keys: one
    of them must come with a request; none is needed where there are none. public: which of
    /health, /ready and /metrics need none. allowed_hosts: what a Host header may say, without port;
    empty allows all. cors_origins: of other pages that may ask. log_prompts: whether the log has
    them.
    """

    max_body: int = 4 * MEGABYTE
    body_seconds: float = 30.0
    request_seconds: float = 600.0
    send_seconds: float = 30.0
    most_unsent: int = 16 * MEGABYTE
    most_choices: int = 128
    api_keys: tuple[str, ...] = ()
    public: tuple[str, ...] = ("/health", "/ready")
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False


def own_names(address: str) -> tuple[str, ...]:
    """The names that a server may be called by which listens at an address: of one that only this
    machine reaches its own, else any."""
    if not ipaddress.ip_address(address).is_loopback:
        return ("*",)
    return tuple(dict.fromkeys((*LOOPBACK, f"[{address}]" if ":" in address else address)))


def settings_of(options: Options, *, allowed_hosts: tuple[str, ...]) -> Settings:
    """Those of a command line. allowed_hosts: where it names none."""
    return Settings(
        max_body=options.max_body,
        body_seconds=options.body_timeout,
        request_seconds=options.request_timeout,
        send_seconds=options.send_timeout,
        most_unsent=options.max_unsent,
        most_choices=min(options.max_choices, options.max_batch + options.max_waiting),
        api_keys=options.api_key,
        public=options.public_paths,
        allowed_hosts=options.allowed_host or allowed_hosts,
        cors_origins=options.cors_origin,
        log_prompts=options.log_prompts,
    )
