"""The entries of a comparison made ready: a process with a model, or a server, and its prompts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.quantize import check_quantize
from decode.cli import outline
from decode.compare.client import NO_KEY, Client, Run, check_endpoint
from decode.compare.config import (
    CompareConfig,
    Endpoint,
    Ours,
    Transformers,
    Vllm,
    Workload,
)
from decode.compare.local import (
    Worker,
    encode_all,
    peak_bytes,
    prepare,
    reset_peak,
    tokenizer_of,
)
from decode.compare.server import VllmServer, check_python


@dataclass(frozen=True)
class Contestant:
    """An entry that can be measured.

    facts: what the report says of it.
    run: answers the first prompts of a workload, so many, at a concurrency. It raises InputError
        where the entry itself has failed, not where a request has.
    """

    facts: dict[str, Any]
    run: Callable[[Workload, int, int], Run]


# A server that the command starts, or an endpoint.

DEATH_SECONDS = 2.0  # after a request has failed, in which its server may turn out to be dead


class Served:
    """A server of ours or an endpoint. Prompts are sent as the token ids, or the text, that the
    model's own tokenizer and chat template give."""

    def __init__(
        self,
        entry: Vllm | Endpoint,
        client: Client,
        tokenizer: Any,
        workloads: list[Workload],
        server: VllmServer | None,
    ):
        self.client, self.server = client, server
        self.ids = {w.name: encode_all(tokenizer, w, entry.name) for w in workloads}
        self.prompts: dict[str, list[Any]] = dict(self.ids)
        if entry.prompt_as == "text":
            self.prompts = {n: [tokenizer.decode(i) for i in ids] for n, ids in self.ids.items()}
        self.facts: dict[str, Any] = {"url": client.url, "stream": entry.stream}
        if server is not None:
            here = f"{Path.cwd()}{os.sep}"
            self.facts |= {
                "command": [part.removeprefix(here) for part in server.command],
                "environment": server.entry.env,
                "vllm": server.version(),
                "startup_seconds": round(server.startup_seconds, 1),
            }

    def run(self, workload: Workload, count: int, concurrency: int) -> Run:
        """Answer prompts; of a server of ours read the memory and count the forwards too."""
        # Asked anew for each run: which processes a server has is its own affair.
        pids = tree(self.server.pid) if self.server is not None else []
        reset_peak(pids)
        prompts, rules = (
            self.prompts[workload.name][:count],
            (workload.max_new_tokens, workload.stop),
        )
        run = self.client.run(prompts, concurrency, *rules)
        if self.server is None:
            return run
        # A failed request may be the first sign of a server that is dying: given a moment, the
        # error is the server's, with its log.
        failed = any(answer.error for answer in run.answers)
        self.server.check(DEATH_SECONDS if failed else 0.0)
        run.peak_bytes = peak_bytes(pids)
        if not any("specul" in argument for argument in self.server.command):
            # Without speculation each token that the server counts took one forward.
            for answer, ids in zip(run.answers, self.ids[workload.name], strict=False):
                if answer.own_tokens:
                    answer.forwards = answer.own_tokens
                    answer.rows = len(ids) + answer.own_tokens - 1
        return run


# All kinds.


def check_entries(config: CompareConfig, workloads: list[Workload]) -> None:
    """Raise InputError for an entry that cannot be started, or of ours that cannot decode a
    workload, before any is started."""
    # Models without weights, each built once however many entries use it.
    shapes: dict[tuple[str | None, ...], DiffusionModel] = {}
    for entry in config.entries:
        if isinstance(entry, Ours):
            key = (entry.model, entry.adapter, entry.family)
            try:
                if key not in shapes:
                    shapes[key] = outline(*key)
                for workload in workloads:
                    prepare(entry, workload, shapes[key])
                if entry.quantize is not None:
                    device = parse_device(entry.device)
                    check_quantize(entry.quantize, device, parse_dtype(entry.dtype, device))
            except InputError as error:
                raise InputError(f"entry {entry.name}: {error}") from error
        if isinstance(entry, Vllm) and entry.shares is None:
            check_python(entry, entry.python or config.vllm_python)
        if isinstance(entry, Endpoint):
            check_endpoint(entry.url.rstrip("/"), entry.model, _key(entry), config.limits)


def make_ready(
    config: CompareConfig,
    workloads: list[Workload],
    logs: Path,
    stack: ExitStack,
    *,
    verbose: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Contestant]:
    """Start what the entries need, which `stack` stops; return the contestants by name.

    verbose: workers show what libraries say. say: is told of each entry before it starts. Raises
    InputError.
    """
    workers: dict[str, Worker] = {}
    servers: dict[str, VllmServer] = {}
    contestants: dict[str, Contestant] = {}
    for entry in config.entries:
        say(f"starting {entry.name} ({entry.kind}: {entry.model})")
        owner = getattr(entry, "shares", None) or entry.name
        if isinstance(entry, Ours | Transformers):
            if owner not in workers:
                # One process serves all entries that share its model, told of them at its start.
                sharing = [e for e in config.entries if isinstance(e, Ours) and e.shares == owner]
                started = Worker([entry, *sharing], workloads, verbose)
                workers[owner] = stack.enter_context(started)
            worker = workers[owner]
            run = partial(worker.run, entry.name)
            contestants[entry.name] = Contestant(worker.facts[entry.name], run)
            continue
        server = None
        if isinstance(entry, Vllm):
            if owner not in servers:
                python = entry.python or config.vllm_python
                # A name of an entry may have what a file name may not.
                log = logs / f"{entry.name.replace('/', '-').replace(' ', '-')}.log"
                servers[owner] = stack.enter_context(VllmServer(entry, python, log))
            server = servers[owner]
            url, model, key = f"{server.address}/v1", owner, NO_KEY
        else:
            url, model, key = entry.url.rstrip("/"), entry.model, _key(entry)
        tokenizer = tokenizer_of(entry.tokenizer if isinstance(entry, Endpoint) else entry.model)
        client = Client(entry, url, model, config.limits, config.retries, key)
        served = Served(entry, client, tokenizer, workloads, server)
        contestants[entry.name] = Contestant(served.facts, served.run)
    return contestants


def _key(entry: Endpoint) -> str:
    """Read an endpoint's API key from the environment. Raises InputError."""
    if entry.api_key_env is None:
        return NO_KEY
    key = os.environ.get(entry.api_key_env)
    if not key:
        raise InputError(f"entry {entry.name}: the variable {entry.api_key_env} holds no key")
    return key


def tree(pid: int) -> list[int]:
    """List a process and all its descendants."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


EVERY = 0.1  # seconds
IDLE = 0.02  # seconds of computing in so many that a server may take which waits for requests


def wait_for_calm(most: float = 5.0) -> None:
    """Wait, at most `most` seconds, until the processes that this one started compute no more: a
    server may go on for a while after its last answer, and the next entry's timed run, of a small
    model a quarter of a second, would be measured beside it."""
    end = time.monotonic() + most
    before = _computed()
    while time.monotonic() < end:
        time.sleep(EVERY)
        now = _computed()
        if now - before <= IDLE:
            return
        before = now


def _computed() -> float:
    """Sum the CPU seconds of this process's descendants."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
