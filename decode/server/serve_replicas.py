"""`decode.serve --replicas N`: replicas on Ray, and their front in this process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from fastapi import FastAPI

from d2f.errors import InputError
from decode.cluster.ray_session import ray_session
from decode.commands.decoder_settings import DecoderSettings
from decode.commands.run_command import say
from decode.server.load_models import check_outlines
from decode.server.logs import set_up_logs
from decode.server.settings import Settings


def serve_replicas(
    options: argparse.Namespace,
    decoding: DecoderSettings,
    settings: Settings,
    listener: socket.socket,
) -> None:
    """Serve until a signal ends it; then nothing of it is left. Raises InputError."""
    check_outlines(options, decoding)
    flag = "--max-replicas" if options.replicas is None else "--replicas"
    gpus = options.replica_gpus
    if gpus is None:
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        gpus = int(device == "cuda")
    os.environ.setdefault("RAY_worker_niceness", "0")  # clients wait: by default Ray's is 15
    with ray_session(options.ray_address, options.max_replicas, flag, gpus=gpus) as cores:
        from ray import serve

        from decode.server.front import create_front
        from decode.server.run_server import run_server

        if not options.verbose:
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
        say(f"starting {options.min_replicas} replicas, each with {cores} cores and {gpus} GPUs")
        name = f"d2f-{uuid.uuid4().hex[:8]}"  # others may use the cluster, too
        try:
            serve.start(proxy_location="Disabled")
            handle = _deploy(name, options, {"num_cpus": cores, "num_gpus": gpus})

            @asynccontextmanager
            async def lifespan(app: FastAPI) -> AsyncIterator[None]:
                loop, reloads = asyncio.get_running_loop(), set()
                loop.add_signal_handler(
                    signal.SIGHUP, lambda: reloads.add(loop.create_task(_reload(handle)))
                )
                yield

            app = create_front(
                handle, settings, reads_prompts=options.reuse_prefixes, lifespan=lifespan
            )
            set_up_logs(options.log_format)
            run_server(app, listener, options.drain_seconds)
        finally:
            serve.delete(name)


def _deploy(name: str, options: argparse.Namespace, each: dict[str, int]) -> Any:
    """Start the replicas, `each` with its share of the machine; their handle. Raises InputError."""
    from ray import serve

    from decode.server.ray_application import replicas

    scaling: dict[str, Any] = {"num_replicas": options.max_replicas}
    if options.min_replicas < options.max_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_requests or options.max_batch,
            }
        }
    try:
        return serve.run(
            replicas(options, ray_actor_options=each, max_constructor_retry_count=1, **scaling),
            name=name,
            route_prefix=None,
        )
    except RuntimeError as error:
        said = [line for line in str(error).splitlines() if "Error: " in line] or [str(error)]
        raise InputError(f"no replica could be started: {said[-1].strip()}") from error


async def _reload(handle: Any) -> None:
    """Have all replicas load their models anew, and say how it went."""
    say("SIGHUP: loading the models anew")
    told = await handle.broadcast("reload").results_async(return_exceptions=True)
    failed = {str(one).strip().splitlines()[-1] for one in told if isinstance(one, Exception)}
    for error in failed:
        say(f"error: {error}; the former models stay")
    if not failed:
        say(f"{len(told)} replicas have loaded the models anew")
