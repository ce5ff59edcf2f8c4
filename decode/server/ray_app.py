"""Serve by replicas on Ray Serve, each the whole application in a process of its own, behind Ray's
HTTP proxy. `decode.serve --replicas N` starts them, or Ray's own commands from `application`::

    serve run configs/ray/serve-tiny.yaml
"""

from __future__ import annotations

import sys
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.server.app import create_app
from decode.server.middleware import set_up_logs
from decode.server.models import check_models, load_models
from decode.server.options import Options, listening_at, parse
from decode.server.run import SWITCH_SECONDS
from decode.server.state import ServerState

MOST = 1_000_000  # requests at a time: the engines' own queues say what is too many
HEALTH_SECONDS = 2.0  # between looks at whether a replica lives


@serve.deployment(
    name="Replica",
    max_ongoing_requests=MOST,
    health_check_period_s=HEALTH_SECONDS,
    graceful_shutdown_wait_loop_s=0.1,
    logging_config={"enable_access_log": False, "log_level": "WARNING"},
)
@serve.ingress()
class Replica:
    """Run the application in a process that Ray starts, watches and replaces.

    options: the command line. address: where clients reach Ray's proxy.
    """

    def __init__(self, options: Options, address: str):
        self._options = options
        self._address = address
        self._state: ServerState | None = None
        sys.setswitchinterval(SWITCH_SECONDS)

    def __serve_build_asgi_app__(self) -> FastAPI:
        set_up_logs(self._options.log_format)
        with quiet(self._options.verbose):
            models = load_models(self._options)
        app = create_app(models, listening_at(self._options, self._address))
        self._state = app.state.server
        return app

    def check_health(self) -> None:
        """Raise where an engine has ended: Ray then starts another replica in this one's place."""
        if self._state is not None and not self._state.ready:
            raise RuntimeError("an engine has ended")


def application(args: dict[str, Any]) -> Application:
    """Make the application of `serve run` and `serve deploy`. Raises InputError.

    args: options of `decode.serve` without their dashes, ``{"model": "tiny-d2f", "max-batch": 8}``;
    a list gives one several times, true gives one that has no value. How many replicas there are,
    and what each has of a machine, is the configuration's ``deployments``.
    """
    options = parse(command_line(args))
    if options.max_replicas is not None:
        raise InputError("args: how many replicas there are is num_replicas of the deployment")
    check_models(options)
    return bound(options, "0.0.0.0")


def bound(options: Options, address: str, **more: Any) -> Application:
    """Make the application. more: options of Ray's deployment."""
    replica: Any = Replica  # Ray's decorators are typed as if they changed nothing
    return replica.options(graceful_shutdown_timeout_s=options.drain_seconds, **more).bind(
        options, address
    )


def command_line(args: dict[str, Any]) -> list[str]:
    """Write ``{"model": ["a", "b"], "verbose": True}`` as ``--model a --model b --verbose``."""
    words = []
    for name, value in args.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return words
