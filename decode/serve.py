"""Serve models through OpenAI's HTTP interface: `python -m decode.serve --model tiny-d2f`.

docs/serving.md says what it takes and gives; the parts are in decode/server.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from dataclasses import replace

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.cli import command, followed, require_extra, require_ray
from decode.server.options import Options, parse

NEEDS = ("fastapi", "uvicorn", "openai", "prometheus_client", "sse_starlette")


@command(interrupted="interrupted before it served")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; its exit status."""
    options = parse(arguments)
    require_extra("serve", "the server", *NEEDS)
    if options.max_replicas is not None:
        require_ray()
    with quiet(options.verbose):
        serve(options)


def serve(options: Options) -> None:
    """Serve until told to end. Raises InputError before anything is served, RankError."""
    if followed(options, (replace(options, model=name) for name in options.named.values())):
        return
    # Bound before the models are loaded, which takes long: a port in use is known at once.
    with bind(options.host, options.port) as listener:
        from decode.cli import read_settings
        from decode.server.models import check_models, load_models, settings_of

        decoding = read_settings(options)
        check_models(options, decoding)
        address, port = listener.getsockname()[:2]
        if options.max_replicas is not None:
            from decode.server.ray_app import serve_replicas

            listener.close()
            serve_replicas(options, decoding, address, port)
            return
        from decode.server.app import create_app
        from decode.server.middleware import set_up_logs
        from decode.server.run import run_server

        app = create_app(load_models(options, decoding), settings_of(options, address=address))
        set_up_logs(options.log_format)
        run_server(app, listener, options.drain_seconds)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address, not yet listening. Raises InputError."""
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


if __name__ == "__main__":
    sys.exit(main())
