"""Serve models through OpenAI's HTTP interface: `python -m decode.serve --model tiny-d2f`.

docs/serving.md says what it takes and gives; the parts are in decode/server.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from d2f.command import command, require_extra, say
from d2f.errors import InputError
from d2f.quiet import quiet
from decode.cli import followed, require_ray
from decode.server.options import Options, listening_at, parse


@command(interrupted="interrupted before it served")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    require_extra("serve", "the server", "fastapi", "uvicorn", "prometheus_client", "sse_starlette")
    if options.max_replicas is not None:
        require_ray()
    with quiet(options.verbose):
        serve(options)


def serve(options: Options) -> None:
    """Serve until a signal ends it. Raises InputError before anything is served, RankError."""
    if followed(options, (replace(options, model=name) for name in options.named.values())):
        return
    # Bound before the models are loaded, which takes long: a port in use is known at once.
    with bind(options.host, options.port) as listener:
        from decode.server.models import check_models, load_models

        check_models(options)
        address, port = listener.getsockname()[:2]
        if options.max_replicas is not None:
            listener.close()  # Ray's proxy listens there
            serve_replicas(options, address, port)
            return
        from decode.server.app import create_app
        from decode.server.middleware import set_up_logs
        from decode.server.run import run_server

        app = create_app(load_models(options), listening_at(options, address))
        set_up_logs(options.log_format)
        run_server(app, listener)


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


def serve_replicas(options: Options, address: str, port: int) -> None:
    """Serve by replicas until a signal ends it; then nothing of it is left. Raises InputError."""
    from decode.workers import ray_session

    least, most = options.min_replicas, options.max_replicas
    assert least is not None and most is not None
    scaling: dict[str, Any] = {"num_replicas": most}
    if least < most:
        scaling = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": options.target_requests or options.max_batch,
            }
        }
    os.environ.setdefault("RAY_worker_niceness", "0")  # clients wait: by default Ray's is 15
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # a line a request, alike or not
    session = ray_session(
        options.ray_address,
        most,
        "--max-replicas" if options.replicas is None else "--replicas",
        options.device,
        gpus=options.replica_gpus,
        log_to_driver=True,
    )
    with session as (cores, gpus):
        from ray import serve
        from ray.serve.schema import LoggingConfig

        from decode.server.ray_app import bound
        from decode.server.run import url_of

        if not options.verbose:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        say(f"starting {least} replicas, each with {cores} cores and {gpus} GPUs")
        over = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own
            signal.signal(number, lambda *_: over.set())
        each = {"num_cpus": cores, "num_gpus": gpus}
        replicas = bound(
            options, address, ray_actor_options=each, max_constructor_retry_count=1, **scaling
        )
        name = f"d2f-{uuid.uuid4().hex[:8]}"  # others may use the cluster, too
        try:
            quiet_ray = LoggingConfig(log_level="WARNING", enable_access_log=False)
            serve.start(http_options={"host": address, "port": port}, logging_config=quiet_ray)
            serve.run(replicas, name=name)
            say(f"serving on {url_of(address, port)}")
            over.wait()
            say(f"stopping: requests that run have {options.drain_seconds:g} s to finish")
        except RuntimeError as error:
            said = [line for line in str(error).splitlines() if "Error: " in line] or [str(error)]
            raise InputError(f"no replica could be started: {said[-1].strip()}") from error
        finally:
            serve.delete(name)


if __name__ == "__main__":
    sys.exit(main())
