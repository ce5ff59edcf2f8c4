"""What an operator decides of a server besides its models."""

from __future__ import annotations

import argparse
import ipaddress
from dataclasses import dataclass

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


def settings_of(options: argparse.Namespace, *, allowed_hosts: tuple[str, ...]) -> Settings:
    """Those of a command line. allowed_hosts: where it names none."""
    return Settings(
        max_body=options.max_body,
        body_seconds=options.body_timeout,
        request_seconds=options.request_timeout,
        send_seconds=options.send_timeout,
        most_unsent=options.max_unsent,
        most_choices=min(options.max_choices, options.max_batch + options.max_waiting),
        api_keys=options.api_key,
        public=options.public,
        allowed_hosts=tuple(options.allowed_host) or allowed_hosts,
        cors_origins=tuple(options.cors_origin),
        log_prompts=options.log_prompts,
    )
