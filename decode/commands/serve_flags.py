"""The command line of `python -m decode.serve`; parsing it does not import torch."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Sequence

from d2f.errors import InputError
from d2f.shipped import DECODING, find_config
from decode.commands.decoder_flags import Kind, add_decoder, add_sampling, offered
from decode.commands.parser import (
    DEFAULT_MODEL,
    Parser,
    add_model,
    add_verbose,
    check_least,
    check_model,
)
from decode.commands.replica_flags import add_replicas, check_replicas
from decode.decoders import find_decoder

KEY_VARIABLE = "D2F_API_KEY"
PUBLIC = ("/health", "/ready", "/metrics")
MOST_SECONDS = 1_000_000  # the system counts milliseconds in 32 bits
MOST_REQUESTS = 1_000_000
_HOST = re.compile(r"\*|[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\]")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@]+")

_DESCRIPTION = """\
python -m decode.serve --model tiny-d2f --tau-conf 0.95 --port 8000

Serves models through OpenAI's HTTP interface: /v1/completions and /v1/chat/completions, with
streams of settled text alone, and a page at / that shows the pipeline. A request may choose its
decoder and that decoder's options. docs/serving.md says more.
"""
_EPILOG = """\
SIGTERM or Ctrl-C: no new requests, those that run finish within --drain-seconds; a second one
cancels them. exit status: 0 ended so; 2 bad input, found before a model is loaded where it can be.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; a decoder option that was not given is not in it. model:
    the models by the names that they are served under.

    Raises InputError for a bad command line, SystemExit after --help.
    """
    options = _parser(offered(arguments)).parse_args(arguments)
    options.model = named_models(options.model or [DEFAULT_MODEL])
    for flag in ("adapter", "family"):
        if getattr(options, flag) is not None and len(options.model) > 1:
            raise InputError(f"--{flag} is for one model, got {len(options.model)}")
    check_model(options)
    check_least(
        options, max_batch=1, slots=1, request_slots=1, max_waiting=0, max_model_len=2, max_body=1,
        max_unsent=1, max_choices=1, prefill_rows=1, port=0, drain_seconds=0,
    )  # fmt: skip
    for flag in ("body_timeout", "request_timeout", "send_timeout", "drain_seconds"):
        value = getattr(options, flag)
        name = flag.replace("_", "-")
        if not math.isfinite(value) or (value <= 0 and flag != "drain_seconds"):
            raise InputError(f"--{name} must be a number of seconds above 0, got {value:g}")
        if value > MOST_SECONDS:
            raise InputError(f"--{name} must be at most {MOST_SECONDS} seconds, got {value:g}")
    for flag in ("max_batch", "max_waiting"):
        if getattr(options, flag) > MOST_REQUESTS:
            name, value = flag.replace("_", "-"), getattr(options, flag)
            raise InputError(f"--{name} must be at most {MOST_REQUESTS}, got {value}")
    if options.port > 65535:
        raise InputError(f"--port must be at most 65535, got {options.port}")
    check_replicas(options)
    options.api_key = keys(options.api_key)
    options.public = _public(options.public)
    options.allowed_host = [_host(name) for name in options.allowed_host]
    for origin in options.cors_origin:
        if not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"--cors-origin must be like https://a.example:8443 or *, got {origin!r}"
            )
    if options.decoder is not None:
        find_decoder(options.decoder)
    if options.allow_decoders is not None:
        options.allow_decoders = options.allow_decoders.split(",")
        for name in options.allow_decoders:
            find_decoder(name)
    if options.config is not None:
        options.config = str(find_config(options.config, *DECODING))
    return options


def named_models(given: Sequence[str]) -> dict[str, str]:
    """What each --model is, by the name that it is served under: ``ALIAS=NAME``, or a name that is
    both. Raises InputError."""
    found: dict[str, str] = {}
    for one in given:
        alias, equals, name = one.partition("=")
        if not equals or "/" in alias:  # a folder's name may have any sign
            alias = name = one
        if not alias or not name:
            raise InputError(f"--model must be NAME or ALIAS=NAME, got {one!r}")
        if alias in found:
            raise InputError(f"--model: two are called {alias}: give one as ALIAS=NAME")
        found[alias] = name
    return found


def of_model(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options as `load_model` takes them, for one of the models."""
    return argparse.Namespace(**vars(options) | {"model": name})


def keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The keys of the command line, else those of the environment, where spaces stand between them.
    Raises InputError, which does not show them; also for a variable without a key, which was to
    close the server and would leave it open."""
    said = os.environ.get(KEY_VARIABLE)
    if given is None and said is not None and not said.split():
        raise InputError(f"{KEY_VARIABLE} is set and has no key: expected one, or no such variable")
    found = tuple((said or "").split() if given is None else given)
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in found):
        raise InputError("--api-key must be printable ASCII without spaces")
    return found


def _host(given: str) -> str:
    """A name of the server as requests give it, without case."""
    name = given.lower().removesuffix(".")
    if not _HOST.fullmatch(name):
        raise InputError(
            f"--allowed-host must be a name or address without port, as a.example or [::1], or *, "
            f"got {given!r}"
        )
    return name


def _public(text: str) -> tuple[str, ...]:
    found = tuple(text.split(",")) if text else ()
    if set(found) - set(PUBLIC):
        raise InputError(f"--public must be some of {','.join(PUBLIC)}, got {text!r}")
    return found


def _parser(kinds: list[Kind]) -> argparse.ArgumentParser:
    parser = Parser(
        "python -m decode.serve",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        usage=argparse.SUPPRESS,  # the description opens with it
        allow_abbrev=False,
    )
    models = parser.add_argument_group("models")
    several = "; may be given several times; ALIAS=NAME serves it under another name"
    add_model(models, "merge", "family", "compile", "tensor-parallel", several=several)
    models.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its response (default: the model's context)",
    )
    decoder = parser.add_argument_group(
        "decoder",
        "What requests get that say nothing else; for a model that the decoder does not fit, its "
        "own default one.",
    )
    tokens = parser.add_argument_group("choice of tokens (all decoders; default: greedy)")
    _add_engine(parser.add_argument_group("engine (each model has its own)"))
    add_replicas(parser.add_argument_group("replicas (extra ray)"))
    _add_limits(parser.add_argument_group("limits"))
    _add_access(parser.add_argument_group("address and access"))
    _add_log(parser.add_argument_group("log, on standard error"))
    decoder.add_argument(
        "--allow-decoders",
        metavar="NAMES",
        help="decoders that requests may name, with commas between them (default: all that fit the "
        "model)",
    )
    add_sampling(tokens, kinds)
    add_decoder(decoder, kinds)
    return parser


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-batch",
        type=int,
        default=16,
        metavar="N",
        help="most requests in a forward (default 16)",
    )
    group.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="slots of the cache, a position each (default: by batch, context and free memory)",
    )
    group.add_argument(
        "--request-slots",
        type=int,
        metavar="N",
        help="most slots that a request may need, and so rows that it feeds in a forward: prompt, "
        "response, and what its decoder drafts (default: about four times --max-model-len)",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="most that wait for room; more are refused with 429 (default 256)",
    )
    group.add_argument(
        "--prefill-rows",
        type=int,
        metavar="N",
        help="most rows of prompts in a forward, so that a long one does not hold up the others "
        "(default: as many whole ones as 4096 rows hold)",
    )
    group.add_argument(
        "--reuse-prefixes",
        action="store_true",
        help="copy the rows of a prompt that an earlier one began with, where that is exact",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-choices",
        type=int,
        default=128,
        metavar="N",
        help="most answers to a request, prompts times n (default 128)",
    )
    group.add_argument(
        "--max-body",
        type=int,
        default=4_000_000,
        metavar="BYTES",
        help="of a request (default 4000000)",
    )
    group.add_argument(
        "--max-unsent",
        type=int,
        default=16_000_000,
        metavar="BYTES",
        help="of forwards that wait for a client that asked for events and does not read (default "
        "16000000)",
    )
    for name, default, text in (
        ("body", 30.0, "until the whole of a request must have come"),
        ("request", 600.0, "until its answer must be complete"),
        ("send", 30.0, "until a client must have taken what it was sent"),
    ):
        group.add_argument(
            f"--{name}-timeout",
            type=float,
            default=default,
            metavar="SECONDS",
            help=f"{text} (default {default:g})",
        )
    group.add_argument(
        "--drain-seconds",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long running requests may go on after SIGTERM (default 30)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address (default 127.0.0.1)")
    group.add_argument(
        "--port", type=int, default=8000, help="0 takes any that is free (default 8000)"
    )
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that requests must bear, may be given several times; better in the environment "
        f"variable {KEY_VARIABLE}, which other users cannot see (default: none needed)",
    )
    group.add_argument(
        "--public",
        default="/health,/ready",
        metavar="PATHS",
        help=f"which of {','.join(PUBLIC)} need no key (default /health,/ready)",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name that requests may call the server by, may be given several times, * for any "
        "(default: localhost and its addresses where it listens there alone, else any)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="another site whose pages may ask, may be given several times (default: none)",
    )


def _add_log(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="default text"
    )
    group.add_argument("--log-prompts", action="store_true", help="write prompts into the log, too")
    add_verbose(group)
