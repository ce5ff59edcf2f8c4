"""An entry made ready: its worker or server is up, its prompts are encoded."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.quantize import check_quantize
from decode.commands.load_model import outline
from decode.comparison import process_memory
from decode.comparison.answers import Run
from decode.comparison.comparison_config import (
    AnyEntry,
    CompareConfig,
    Endpoint,
    Ours,
    Transformers,
    Vllm,
)
from decode.comparison.completions import ignored_limit
from decode.comparison.entry_prompts import count_tokens, encode_all, tokenizer_of
from decode.comparison.ours import prepare
from decode.comparison.served import Client, check_endpoint
from decode.comparison.server import VllmServer, check_python
from decode.comparison.worker import Worker, WorkerContestant
from decode.comparison.workload import Workload

DEATH_SECONDS = 2.0  # after a request has failed, in which its server may turn out to be dead


class Contestant(Protocol):
    """What is measured. facts: what the report says of it."""

    facts: dict[str, Any]

    @property
    def entry(self) -> AnyEntry: ...

    def run(self, workload: Workload, count: int, concurrency: int) -> Run:
        """The first `count` prompts of a workload at a concurrency. Raises InputError where the
        entry itself has failed, not where a request has."""


class ServedContestant:
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
        self.entry = entry
        self.client = client
        self.server = server
        self.tokenizer = tokenizer
        self.prompts: dict[str, list[Any]] = {}
        self.lengths: dict[str, list[int]] = {}
        for workload in workloads:
            ids = encode_all(tokenizer, workload, entry.name)
            as_text = entry.prompt_as == "text"
            self.prompts[workload.name] = [tokenizer.decode(i) for i in ids] if as_text else ids
            self.lengths[workload.name] = [len(i) for i in ids]
        self.facts: dict[str, Any] = {"url": client.url, "stream": entry.stream}
        if server is not None:
            self.facts |= {
                "command": [_from_here(part) for part in server.command],
                "environment": server.entry.env,
                "vllm": server.version(),
                "startup_seconds": round(server.startup_seconds, 1),
            }

    def run(self, workload: Workload, count: int, concurrency: int) -> Run:
        # Asked anew for each run: which processes a server has is its own affair.
        pids = process_memory.tree(self.server.pid) if self.server is not None else []
        process_memory.reset_peak(pids)
        run = self.client.run(
            self.prompts[workload.name][:count],
            concurrency,
            max_new_tokens=workload.max_new_tokens,
            stop=workload.stop,
        )
        texts = [answer.text for answer in run.answers]
        for answer, tokens in zip(run.answers, count_tokens(self.tokenizer, texts), strict=True):
            if answer.error is None:
                answer.error = ignored_limit(answer, tokens, workload.max_new_tokens)
        if self.server is not None:
            failed = any(answer.error for answer in run.answers)
            # A failed request may be the first sign of a server that is dying: given a moment, the
            # error is the server's, with its log.
            self.server.check(DEATH_SECONDS if failed else 0.0)
            run.peak_bytes = process_memory.peak_bytes(pids)
            if not any("specul" in argument for argument in self.server.command):
                self._count_forwards(run, self.lengths[workload.name])
        return run

    def _count_forwards(self, run: Run, lengths: list[int]) -> None:
        """Without speculation each token that the server counts took one forward."""
        for answer in run.answers:
            if answer.own_tokens:
                answer.forwards = answer.own_tokens
                answer.rows = lengths[answer.item] + answer.own_tokens - 1


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
            check_endpoint(entry.url.rstrip("/"), entry.model, headers(entry), config.limits)


def make_ready(
    entry: AnyEntry,
    config: CompareConfig,
    workloads: list[Workload],
    logs: Path,
    started: dict[str, VllmServer | Worker],
    stack: ExitStack,
    *,
    verbose: bool = False,
) -> Contestant:
    """Start what an entry needs; `stack` stops it. started: servers and workers so far, by entry; a
    new one is put there. verbose: workers show what libraries say. Raises InputError."""
    if isinstance(entry, Ours | Transformers):
        return _local(entry, config, workloads, started, stack, verbose)
    server = None
    if isinstance(entry, Vllm):
        tokenizer = tokenizer_of(entry.model)
        owner = entry.shares or entry.name
        if owner not in started:
            python = entry.python or config.vllm_python
            # A name of an entry may have what a file name may not.
            log = logs / f"{entry.name.replace('/', '-').replace(' ', '-')}.log"
            started[owner] = stack.enter_context(VllmServer(entry, python, log))
        found = started[owner]
        assert isinstance(found, VllmServer)
        server = found
        url, served_name = server.url, owner
    else:
        tokenizer = tokenizer_of(entry.tokenizer)
        url, served_name = entry.url.rstrip("/"), entry.model
    client = Client(entry, url, served_name, config.limits, config.retries, headers(entry))
    return ServedContestant(entry, client, tokenizer, workloads, server)


def _local(
    entry: Ours | Transformers,
    config: CompareConfig,
    workloads: list[Workload],
    started: dict[str, VllmServer | Worker],
    stack: ExitStack,
    verbose: bool,
) -> WorkerContestant:
    """An entry in a process of its own, or in that of the entry whose it shares."""
    owner = getattr(entry, "shares", None) or entry.name
    if owner not in started:
        # One process serves all entries that share its model, and is told of them when it starts.
        sharing = [e for e in config.entries if isinstance(e, Ours) and e.shares == owner]
        started[owner] = stack.enter_context(Worker([entry, *sharing], workloads, verbose))
    worker = started[owner]
    assert isinstance(worker, Worker)
    return WorkerContestant(worker, entry)


def headers(entry: Vllm | Endpoint) -> dict[str, str]:
    """The authorization that an entry asks for. Raises InputError."""
    if not isinstance(entry, Endpoint) or entry.api_key_env is None:
        return {}
    key = os.environ.get(entry.api_key_env)
    if not key:
        raise InputError(f"entry {entry.name}: the variable {entry.api_key_env} holds no key")
    return {"authorization": f"Bearer {key}"}


def _from_here(argument: str) -> str:
    """An argument of a command; a path below the working folder, from there."""
    here = f"{Path.cwd()}{os.sep}"
    return argument.removeprefix(here)
