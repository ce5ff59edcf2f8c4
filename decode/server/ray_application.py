"""The application as Ray Serve has it: `application` makes it from a configuration file,

    serve run configs/ray/serve-tiny.yaml

of replicas, and of fronts that Ray's HTTP proxy hands requests to.
"""

from __future__ import annotations

import argparse
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from d2f.errors import InputError
from decode.commands.decoder_settings import read_settings
from decode.commands.serve_flags import parse
from decode.server.front import create_front
from decode.server.load_models import check_models, check_outlines
from decode.server.logs import set_up_logs
from decode.server.replica import Replica
from decode.server.settings import settings_of

MOST_WITHOUT_REPLICA = 1000  # requests that are not given to one yet, as for moments all are
MOST = 1_000_000  # calls at a time: the engines' own queues say what is too many
HEALTH_SECONDS = 2.0  # between looks at whether a replica lives
PREFIX_ROUTER = (  # of ray.serve.llm, which imports vLLM before it gives it
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:"
    "PrefixCacheAffinityRouter"
)


def application(args: dict[str, Any]) -> Application:
    """The application for `serve run` and `serve deploy`. args: options of `decode.serve` without
    their dashes, ``{"model": "tiny-d2f", "max-batch": 8}``; a list gives one several times, true
    gives one that has no value. How many replicas there are, and what each has of a machine, is
    the configuration's ``deployments``. Raises InputError."""
    options = parse(command_line(args))
    if options.max_replicas is not None:
        raise InputError("args: how many replicas there are is num_replicas of the deployment")
    decoding = read_settings(options)
    check_models(options, decoding)
    check_outlines(options, decoding)
    front: Any = _Front  # Ray's decorators are typed as if they changed nothing
    return front.bind(options, replicas(options))


def replicas(options: argparse.Namespace, **more: Any) -> Application:
    """The deployment of the replicas alone. more: options of Ray's."""
    kept = argparse.Namespace(**vars(options) | {"api_key": (), "cors_origin": []})
    settings: dict[str, Any] = {
        "user_config": {"adapter": options.adapter},
        "max_ongoing_requests": MOST,
        "max_queued_requests": MOST_WITHOUT_REPLICA,
        "graceful_shutdown_timeout_s": options.drain_seconds,
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_SECONDS,
        "logging_config": {"enable_access_log": False},
    }
    if options.reuse_prefixes:
        settings["request_router_config"] = {
            "request_router_class": PREFIX_ROUTER,
            "request_router_kwargs": {
                "imbalanced_threshold": options.max_batch,
                "do_eviction": True,
            },
        }
    deployment: Any = serve.deployment(Replica, name="Replica", **settings | more)
    return deployment.bind(kept)


@serve.deployment(
    name="Front", max_ongoing_requests=MOST, logging_config={"enable_access_log": False}
)
@serve.ingress()
class _Front:
    def __init__(self, options: argparse.Namespace, handle: DeploymentHandle):
        self._options = options
        self._handle = handle

    def __serve_build_asgi_app__(self) -> FastAPI:
        options = self._options
        set_up_logs(options.log_format)
        settings = settings_of(options, allowed_hosts=("*",))
        return create_front(self._handle, settings, reads_prompts=options.reuse_prefixes)


def command_line(args: dict[str, Any]) -> list[str]:
    """``{"model": ["a", "b"], "verbose": True}``: ``--model a --model b --verbose``."""
    words = []
    for name, value in args.items():
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}"] if one is True else [f"--{name}", str(one)]
    return words
