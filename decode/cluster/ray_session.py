"""Ray, started here or joined where it runs, and what each worker may have of it.

    with ray_session(None, 4, "--workers") as cores:    # on 16 cores: 4 each
        ray.remote(Work).options(num_cpus=cores)

Ray gives a worker as many threads of torch as it has cores (OMP_NUM_THREADS, unless that is set).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from d2f.errors import InputError
from decode.reporting.extras import require_ray

CONNECT_SECONDS = 5.0


@contextmanager
def ray_session(address: str | None, workers: int, option: str, *, gpus: int = 0) -> Iterator[int]:
    """Within it `ray` is usable; gives the cores that each of so many workers may take. gpus: that
    each needs. option: what asked for the workers, in errors. address: of a cluster, by default
    RAY_ADDRESS; without either Ray is started here, on 127.0.0.1, and stopped at the end. In a
    process that has called `ray.init`, that one is used and goes on.

    Raises InputError where Ray is not installed, for a cluster that is not there, and for more
    workers than there is room for.
    """
    require_ray()
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    here = [{"CPU": cores_here(), "GPU": _gpus_here() if gpus else 0}]
    if address == "local":
        cores = share(here, workers, option, gpus)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local" and "ray" not in sys.modules:
        # Read when Ray is imported: without it, it would listen on this machine's other addresses.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # the default, which said so each time
    import ray

    if ray.is_initialized():
        yield share(nodes(), workers, option, gpus)
        return
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        settings |= {"num_cpus": here[0]["CPU"], "include_dashboard": False}
    else:
        _check_there(address)
    try:
        try:
            ray.init(address, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"no Ray cluster can be used at {address}: {reason}") from error
        yield cores if address == "local" else share(nodes(), workers, option, gpus)
    finally:  # also of a Ctrl-C while it starts
        ray.shutdown()


def share(there: Sequence[Mapping[str, float]], workers: int, option: str, gpus: int = 0) -> int:
    """Most whole cores that each of so many workers can have, each on one node with its GPUs.
    Raises InputError where a worker would have none.

    Two nodes of 8 cores hold 3 workers of 4 cores (two on one, one on the other), none with more.
    """

    def held(cores: int) -> int:
        room = [
            min(node.get(what, 0) // each for what, each in (("CPU", cores), ("GPU", gpus)) if each)
            for node in there
        ]
        return int(sum(room))

    if held(1) < workers:
        what = f"cores with {gpus} GPU each" if gpus else "cores"
        raise InputError(f"{option} {workers}: there are {what} for {held(1)}")
    most = int(max(node.get("CPU", 0) for node in there))
    return max(cores for cores in range(1, most + 1) if held(cores) >= workers)


def nodes() -> list[Mapping[str, float]]:
    """What each machine of the cluster has (CPU, GPU), in a session."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def has_gpus() -> bool:
    """Whether a machine of the cluster has any, in a session."""
    return any(node.get("GPU", 0) for node in nodes())


def cores_here() -> int:
    """Those that this process may use."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return there or 1


def _gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def _check_there(address: str) -> None:
    """Raise InputError where nobody listens at HOST:PORT; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise InputError(
            f"a Ray cluster: expected HOST:PORT, ray://HOST:PORT or auto, got {address!r}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster can be used at {address}: {error}") from error
