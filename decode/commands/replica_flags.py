"""The options of `decode.serve` for several replicas; docs/serving.md says what they do."""

from __future__ import annotations

import argparse
import math

from d2f.errors import InputError
from decode.commands.parser import check_least

_NEED_REPLICAS = ("min_replicas", "target_requests", "replica_gpus", "ray_address")


def add_replicas(group: argparse._ArgumentGroup) -> None:
    """Add the options; `check_replicas` must see what they gave."""
    group.add_argument(
        "--replicas",
        type=int,
        metavar="N",
        help="processes that each hold the models and an engine of each; the cores are divided "
        "among them (default: no Ray, one engine in this process)",
    )
    group.add_argument(
        "--min-replicas",
        type=int,
        metavar="N",
        help="in place of --replicas: keep at least so many (default 1) ...",
    )
    group.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help="... and at most so many, by how many requests there are",
    )
    group.add_argument(
        "--target-requests",
        type=float,
        metavar="X",
        help="requests in flight, for each replica, that the number of replicas is kept to "
        "(default: --max-batch)",
    )
    group.add_argument(
        "--replica-gpus",
        type=int,
        metavar="N",
        help="GPUs of each replica (default: 1 where the device is cuda, else 0)",
    )
    group.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="of a running Ray cluster, or auto (default: Ray is started here, on 127.0.0.1)",
    )


def check_replicas(options: argparse.Namespace) -> None:
    """Raise InputError where the options do not go together. Then min_replicas and max_replicas
    are how many there may be, both None without replicas."""
    check_least(options, replicas=1, min_replicas=1, max_replicas=1, replica_gpus=0)
    if options.replicas is not None:
        if options.min_replicas is not None or options.max_replicas is not None:
            raise InputError("--replicas is a fixed number: leave out --min- and --max-replicas")
        if options.target_requests is not None:
            raise InputError("--target-requests needs --max-replicas, not --replicas")
        options.min_replicas = options.max_replicas = options.replicas
    if options.max_replicas is None:
        for name in _NEED_REPLICAS:
            if getattr(options, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} needs --replicas or --max-replicas")
        return
    if options.tensor_parallel > 1:
        raise InputError("--tensor-parallel is not for replicas: each of them is one process")
    options.min_replicas = options.min_replicas or 1
    if options.min_replicas > options.max_replicas:
        raise InputError(
            f"--min-replicas {options.min_replicas} is more than --max-replicas "
            f"{options.max_replicas}"
        )
    target = options.target_requests
    if target is not None and not (math.isfinite(target) and target > 0):
        raise InputError(f"--target-requests must be a number above 0, got {target:g}")
    if options.device is not None and options.device.startswith("cuda:"):
        raise InputError(
            f"--device {options.device}: Ray gives each replica a GPU of its own, expected cuda"
        )
