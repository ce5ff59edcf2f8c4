"""`python -m decode.serve` as a process, for what measures it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from decode.compare.server import Server, free_port


def our_server(models: Sequence[str], log: Path, *arguments: str, threads: int) -> Server:
    """The server of these models, not started yet. arguments: more of its command line. threads: of
    each forward on a CPU."""
    port = free_port()
    named = [part for model in models for part in ("--model", model)]
    command = [sys.executable, "-m", "decode.serve", *named, "--port", str(port), *arguments]
    env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return Server("decode.serve", command, port, log, env=env)
