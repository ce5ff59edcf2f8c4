"""The options of `d2f serve`: which models, and what an operator decides of their server."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Suppress, UseAppendAction, arg

from d2f import flags as command_line
from d2f.errors import InputError, did_you_mean
from d2f.flags import Switch, check_least, check_model_name
from decode.cli import DEFAULT_MODEL, DecoderOptions, ModelOptions, read_settings
from decode.decoders import find_decoder

KEY_VARIABLE = "D2F_API_KEY"
PUBLIC = ("/health", "/ready", "/metrics")


@dataclass(kw_only=True)
class ServedModelOptions(ModelOptions):
    """Choose the models, and how they are loaded."""

    model: Suppress[str] = DEFAULT_MODEL
    models: Annotated[tuple[str, ...], UseAppendAction, arg(name="model", metavar="NAME")] = ()
    """folder, hub name or bundled model, or ALIAS=NAME; may be given again (default: tiny-d2f)"""
    max_model_len: Annotated[int | None, arg(metavar="N")] = None
    """of prompt and response (default: the context)"""

    @property
    def named(self) -> dict[str, str]:
        """Map the name that a model is served under to its --model. Raises InputError."""
        found: dict[str, str] = {}
        for one in self.models or (DEFAULT_MODEL,):
            alias, equals, name = one.partition("=")
            if not equals or "/" in alias:  # a folder's name may have any sign
                alias = name = one
            if not alias or not name:
                raise InputError(f"--model must be NAME or ALIAS=NAME, got {one!r}")
            if alias in found:
                raise InputError(f"--model: two are called {alias}: give one as ALIAS=NAME")
            found[alias] = name
        return found

    def check(self) -> None:
        """Raise InputError for models that cannot be, or flags that do not go together."""
        for name in self.named.values():
            check_model_name(name)
        for flag in ("adapter", "family"):
            if getattr(self, flag) is not None and len(self.named) > 1:
                raise InputError(f"--{flag} is for one model, got {len(self.named)}")
        check_least(self, max_model_len=2)
        super().check()


@dataclass(kw_only=True)
class EngineOptions:
    """Size the engine that each model has."""

    max_batch: Annotated[int, arg(metavar="N")] = 16
    """most requests in a forward"""
    slots: Annotated[int | None, arg(metavar="N")] = None
    """positions of the cache (default: by free memory)"""
    request_slots: Annotated[int | None, arg(metavar="N")] = None
    """of a request (default: about 4 --max-model-len)"""
    max_waiting: Annotated[int, arg(metavar="N")] = 256
    """most that wait; more get a 429"""
    prefill_rows: Annotated[int | None, arg(metavar="N")] = None
    """most rows of prompts in a forward (default: as many whole prompts as 4096 hold)"""
    max_rows: Annotated[int | None, arg(metavar="N")] = None
    """speculate up to so many rows (default: by device)"""
    reuse_prefixes: Switch = False
    """copy rows of an earlier prompt where that is exact"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(
            self, max_batch=1, slots=1, request_slots=1, max_waiting=0, max_rows=1, prefill_rows=1
        )


@dataclass(kw_only=True)
class ReplicaOptions:
    """Run several processes, by the extra ray (docs/serving.md)."""

    replicas: Annotated[int | None, arg(metavar="N")] = None
    """processes with all models each (default: this one)"""
    min_replicas: Annotated[int | None, arg(metavar="N")] = None
    """in place of --replicas: at least so many ..."""
    max_replicas: Annotated[int | None, arg(metavar="N")] = None
    """... and at most so many, as requests come"""
    target_requests: Annotated[float | None, arg(metavar="X")] = None
    """requests in flight of each (default: --max-batch)"""
    replica_gpus: Annotated[int | None, arg(metavar="N")] = None
    """GPUs of each (default: 1 where the device is cuda)"""
    ray_address: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """running Ray cluster, or auto (default: a new one)"""

    if TYPE_CHECKING:  # of the models' options
        tensor_parallel: int
        device: str | None

    def check(self) -> None:
        """Raise InputError where the flags do not go together. Afterwards min_replicas and
        max_replicas say how many there may be; both are None without replicas."""
        check_least(
            self, replicas=1, min_replicas=1, max_replicas=1, replica_gpus=0, target_requests=0.01
        )
        if self.replicas is not None:
            if (self.min_replicas, self.max_replicas, self.target_requests) != (None, None, None):
                raise InputError(
                    "--replicas is a fixed number: leave out --min-replicas, --max-replicas and "
                    "--target-requests"
                )
            self.min_replicas = self.max_replicas = self.replicas
        if self.max_replicas is None:
            for name in ("min_replicas", "target_requests", "replica_gpus", "ray_address"):
                if getattr(self, name) is not None:
                    flag = name.replace("_", "-")
                    raise InputError(f"--{flag} needs --replicas or --max-replicas")
            return
        self.min_replicas = least = self.min_replicas or 1
        for what, is_so in {
            f"--min-replicas {least} is more than --max-replicas {self.max_replicas}": (
                least > self.max_replicas
            ),
            "--tensor-parallel is not for replicas: each of them is one process": (
                self.tensor_parallel > 1
            ),
            f"--device {self.device}: Ray gives each replica a GPU of its own, expected cuda": (
                ":" in (self.device or "")
            ),
        }.items():
            if is_so:
                raise InputError(what)


@dataclass(kw_only=True)
class LimitOptions:
    """Limit what requests may ask for, and what a client may cost."""

    allow_decoders: Annotated[str | None, arg(metavar="NAMES")] = None
    """that requests may name, with commas (default: all)"""
    sanitize_content: Switch = False
    """read control tokens in a chat's text as plain text"""
    max_choices: Annotated[int, arg(metavar="N")] = 128
    """answers a request, prompts times n"""
    max_body: Annotated[int | None, arg(metavar="BYTES")] = None
    """of a request (default: by context, at least 1e6)"""
    max_unsent: Annotated[int, arg(metavar="BYTES")] = 16_000_000
    """waiting for a slow reader"""
    body_timeout: Annotated[float, arg(metavar="S")] = 30.0
    """until all of a request must be here"""
    request_timeout: Annotated[float, arg(metavar="S")] = 600.0
    """until its answer must be complete"""
    send_timeout: Annotated[float, arg(metavar="S")] = 30.0
    """until a client must have read"""
    drain_seconds: Annotated[float, arg(metavar="S")] = 30.0
    """for running requests after SIGTERM"""

    @property
    def allowed(self) -> list[str] | None:
        """List the decoders of --allow-decoders."""
        return None if self.allow_decoders is None else self.allow_decoders.split(",")

    def check(self) -> None:
        """Raise InputError for a value out of range, or a decoder that is not there."""
        for name in self.allowed or ():
            find_decoder(name)
        check_least(self, max_choices=1, max_body=1, max_unsent=1, drain_seconds=0)
        check_least(self, body_timeout=0.001, request_timeout=0.001, send_timeout=0.001)


@dataclass(kw_only=True)
class AccessOptions:
    """Set the address, the access and the log."""

    host: str = "127.0.0.1"
    """address"""
    port: Annotated[int, arg(metavar="PORT")] = 8000
    """0 takes any that is free"""
    api_key: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="KEY")] = ()
    """that requests must bear; may be given again; better in the environment's D2F_API_KEY"""
    public: Annotated[str, arg(metavar="PATHS")] = "/health,/ready"
    """which of /health,/ready,/metrics need no key"""
    allowed_host: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="NAME")] = ()
    """name it may be called by, or *; may be given again (default: localhost if it listens there,
    else any)"""
    cors_origin: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="ORIGIN")] = ()
    """site whose pages may ask, too; may be given again"""
    log_format: Annotated[Literal["text", "json"], arg(metavar="KIND")] = "text"
    """text or json, on standard error"""
    log_prompts: Switch = False
    """log prompts, too"""

    @property
    def public_paths(self) -> tuple[str, ...]:
        """List the paths that need no key."""
        return tuple(self.public.split(",")) if self.public else ()

    def check(self) -> None:
        """Raise InputError for a value that cannot be; then the keys are those that are asked for,
        and hosts are in lower case."""
        check_least(self, port=0)
        if self.port > 65535:
            raise InputError(f"--port must be at most 65535, got {self.port}")
        self.api_key = keys(self.api_key)
        for path in self.public_paths:
            if path not in PUBLIC:
                hint = did_you_mean(path, PUBLIC)
                raise InputError(
                    f"--public must be some of {','.join(PUBLIC)}, got {self.public!r}{hint}"
                )
        self.allowed_host = tuple(name.lower().removesuffix(".") for name in self.allowed_host)
        for name in self.allowed_host:
            if "/" in name or (not name.endswith("]") and ":" in name):
                raise InputError(
                    "--allowed-host must be a name or address without port, as a.example or [::1], "
                    f"or *, got {name!r}"
                )
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch("[a-z]+://[^/]+", origin):
                raise InputError(
                    f"--cors-origin must be like https://a.example:8443 or *, got {origin!r}"
                )


@dataclass(kw_only=True)
class Options(
    ServedModelOptions,
    DecoderOptions,
    EngineOptions,
    ReplicaOptions,
    LimitOptions,
    AccessOptions,
):
    """Serve models through OpenAI's HTTP interface, with streams of settled text alone, and a page
    at / that shows the pipeline.

    A request may choose its decoder and options; those here are what it gets that says nothing
    else. SIGTERM or Ctrl-C: running requests finish within --drain-seconds; a second one cancels
    them. Exit status: 0 ended so; 2 bad input. docs/serving.md says more.
    """

    examples = (
        "d2f serve --model tiny-d2f --port 8000",
        "d2f serve --model a=tiny-d2f --model b=tiny-ar --max-batch 32 --log-format json",
    )

    def check(self) -> None:
        """Raise InputError for decoder options that no model could be decoded with."""
        read_settings(self).check([1])


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m decode.serve")


def keys(given: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of the command line, else those of the environment, separated by spaces.
    Raises InputError, which does not show them."""
    said = os.environ.get(KEY_VARIABLE)
    if not given and said is not None and not said.split():  # it was meant to close the server
        raise InputError(f"{KEY_VARIABLE} is set and has no key: expected one, or no such variable")
    found = tuple(given or (said or "").split())
    if not all(re.fullmatch("[!-~]+", key) for key in found):
        raise InputError("--api-key must be printable ASCII without spaces")
    return found


def listening_at(options: Options, address: str) -> Options:
    """Fill in the names that the server is called by at an address: unless the operator says, its
    own where only this machine reaches it, otherwise any."""
    names: tuple[str, ...] = ("*",)
    if ipaddress.ip_address(address).is_loopback:
        own = f"[{address}]" if ":" in address else address
        names = tuple(dict.fromkeys(("localhost", "127.0.0.1", "[::1]", own)))
    return replace(options, allowed_host=options.allowed_host or names)
