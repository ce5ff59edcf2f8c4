"""python -m decode.serve --model tiny-d2f --tau-conf 0.95 --port 8000

Serves models through OpenAI's HTTP interface. `--help` lists the options, docs/serving.md says what
it takes and gives; the parts are in decode/server.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.commands.run_command import command, say
from decode.commands.serve_flags import parse
from decode.commands.several_ranks import followed
from decode.reporting.extras import require_serve

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.commands.decoder_settings import DecoderSettings
    from decode.server.served_model import ServedModel

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@command(interrupted="interrupted before it served")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; its exit status."""
    options = parse(arguments)
    require_serve()
    with quiet(options.verbose):
        serve(options)


def serve(options: argparse.Namespace) -> None:
    """Serve until told to end. Raises InputError before anything is served, RankError."""
    if followed(options, (_of_model(options, name) for name in options.model.values())):
        return
    # Bound before the models are loaded, which takes long: a port in use is known at once.
    with bind(options.host, options.port) as listener:
        from decode.commands.decoder_settings import read_settings
        from decode.commands.load_model import check_options
        from decode.server.app import create_app
        from decode.server.logs import set_up_logs
        from decode.server.run_server import run_server
        from decode.server.settings import Settings

        settings = read_settings(options)
        length = settings.given.get("max_new_tokens")
        settings.check([1 if length is None else length])
        for name in options.model.values():
            check_options(_of_model(options, name))
        loopback = listener.getsockname()[0] in ("127.0.0.1", "::1")
        limits = Settings(
            max_body=options.max_body,
            body_seconds=options.body_timeout,
            request_seconds=options.request_timeout,
            send_seconds=options.send_timeout,
            most_unsent=options.max_unsent,
            most_choices=min(options.max_choices, options.max_batch + options.max_waiting),
            api_keys=options.api_key,
            public=options.public,
            allowed_hosts=tuple(options.allowed_host) or (LOOPBACK if loopback else ("*",)),
            cors_origins=tuple(options.cors_origin),
            log_prompts=options.log_prompts,
        )
        app = create_app(load_models(options, settings), limits)
        set_up_logs(options.log_format)
        run_server(app, listener, options.drain_seconds)


def load_models(options: argparse.Namespace, settings: DecoderSettings) -> list[ServedModel]:
    """The models of the command line, each with an engine. Raises InputError."""
    from decode.commands.load_model import load
    from decode.engine.async_engine import AsyncEngine
    from decode.server.served_model import check_settings, serve_model

    loaded = {}
    for alias, name in options.model.items():
        say(f"loading {name}")
        loaded[alias], _ = load(_of_model(options, name))
    check_settings([*loaded.values()], settings)
    models = []
    for alias, model in loaded.items():
        engine = AsyncEngine(
            model,
            batch_size=options.max_batch,
            slots=options.slots,
            request_slots=options.request_slots or most_slots(model, options.max_model_len),
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
                max_model_len=options.max_model_len,
            )
        )
    return models


def most_slots(model: DiffusionModel, max_model_len: int | None) -> int:
    """Most slots of a request, where nobody says: enough for the longest one with FreeDave's four
    states and for its likelihoods. Else one client's thousand drafts would hold up all others."""
    from decode.engine.likelihood import ROWS

    longest = min(model.context_length, max_model_len or model.context_length)
    return max(4 * (longest + 1), longest + ROWS)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises InputError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from error
    return listener


def _of_model(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """The options as `load_model` takes them, for one of the models."""
    return argparse.Namespace(**vars(options) | {"model": name})


if __name__ == "__main__":
    sys.exit(main())
