"""Make the entries of a comparison ready: their prompts, then a process with a model, or a
server."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from d2f.quantize import check_quantize
from decode.cli import DecoderSettings, outline
from decode.compare.client import NO_KEY, Client, check_endpoint
from decode.compare.config import (
    AnyEntry,
    Command,
    CompareConfig,
    Endpoint,
    Ours,
    Transformers,
    Vllm,
    Workload,
    decoder_settings,
    named,
)
from decode.compare.local import Prepared, Worker, tokenizer_of
from decode.compare.results import Run
from decode.compare.server import Server, check_command, check_python
from decode.decoders import qualified_name
from decode.engine.prompts import check, encode
from decode.report import peak_bytes, reset_peak

DEATH_SECONDS = 2.0  # after a request has failed, in which its server may turn out to be dead


@dataclass(frozen=True)
class Contestant:
    """An entry that can be measured.

    facts: what the report says of it.
    prepared: its prompts, by workload.
    answer: answers prompts, so many at once. It raises InputError where the entry itself has
        failed, not where a request has.
    """

    facts: dict[str, Any]
    prepared: dict[str, Prepared]
    answer: Callable[[Prepared, int], Run]

    def run(self, workload: Workload, count: int, concurrency: int) -> Run:
        """Answer the first `count` prompts of a workload, `concurrency` at once."""
        return self.answer(self.prepared[workload.name].first(count), concurrency)


def prepare_entries(
    config: CompareConfig, workloads: list[Workload]
) -> dict[str, dict[str, Prepared]]:
    """Check that each entry can be started and encode its prompts, before any is started; return
    them by the names of entry and workload. Raises InputError."""
    # Models without weights and tokenizers, each once however many entries use it.
    outlines: dict[tuple[Any, ...], Any] = {}
    found: dict[str, dict[str, Prepared]] = {}
    for entry in config.entries:
        if isinstance(entry, Vllm) and entry.shares is None:
            check_python(entry, entry.python or config.vllm_python)
        elif isinstance(entry, Command):
            check_command(entry)
        elif isinstance(entry, Endpoint):
            check_endpoint(entry.url.rstrip("/"), entry.model, _key(entry), config.limits)
        with named(entry):
            what = (
                getattr(entry, key, None) for key in ("model", "adapter", "family", "tokenizer")
            )
            key = type(entry) is Ours, *what
            if key not in outlines:
                outlines[key] = _outline(entry)
            found[entry.name] = {w.name: _prepare(entry, w, outlines[key]) for w in workloads}
            if isinstance(entry, Ours) and entry.quantize is not None:
                device = parse_device(entry.device)
                check_quantize(entry.quantize, device, parse_dtype(entry.dtype, device))
    return found


def _outline(entry: AnyEntry) -> Any:
    """Make what encodes an entry's prompts: a model without weights; of others' a tokenizer."""
    if isinstance(entry, Ours):
        return outline(entry.model, entry.adapter, entry.family)
    name = entry.tokenizer if isinstance(entry, Endpoint) else entry.model
    return SimpleNamespace(path=name, tokenizer=tokenizer_of(name))  # all that `encode` asks for


def _prepare(entry: AnyEntry, workload: Workload, model: Any) -> Prepared:
    """Encode each prompt: messages through the chat template, text and ids as they are; of an entry
    of ours make its decoder, and check both."""
    prompts = [encode(model, item.prompt, item.id, raw=True) for item in workload.items]
    if not isinstance(entry, Ours):
        return Prepared(workload, prompts)
    chosen = decoder_settings(entry, workload.task)
    settings = DecoderSettings(chosen.name, chosen.given | {"stop": workload.stop})
    decoder = settings.decoder(model, workload.max_new_tokens)
    decoder.check(model.contract)
    for item, prompt in zip(workload.items, prompts, strict=True):
        check(model, prompt, decoder, item.id)
    return Prepared(workload, prompts, decoder)


def make_ready(
    config: CompareConfig,
    prepared: dict[str, dict[str, Prepared]],
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
    servers: dict[str, Server] = {}
    found: dict[str, Contestant] = {}
    for entry in config.entries:
        say(f"starting {entry.name} ({entry.kind}: {entry.model})")
        owner = getattr(entry, "shares", None) or entry.name
        if isinstance(entry, Ours | Transformers):
            if owner == entry.name:
                # A process serves all entries that share its model; it learns of them at its start.
                sharing = [e for e in config.entries if isinstance(e, Ours) and e.shares == owner]
                workers[owner] = stack.enter_context(Worker([entry, *sharing], verbose))
            worker, own = workers[owner], prepared[entry.name]
            facts, decoders = worker.facts[entry.name], {k: v.decoder for k, v in own.items()}
            if isinstance(entry, Ours):
                facts["decoder"] = {
                    name: {"decoder": qualified_name(type(decoder)), **asdict(decoder)}
                    for name, decoder in decoders.items()
                    if decoder is not None
                }
            found[entry.name] = Contestant(facts, own, partial(worker.run, entry.name))
        elif isinstance(entry, Vllm | Command):
            if owner == entry.name:
                # A name of an entry may have what a file name may not.
                log = logs / f"{entry.name.replace('/', '-').replace(' ', '-')}.log"
                python = getattr(entry, "python", None) or config.vllm_python
                server = Server(entry, python, log)
                servers[owner] = stack.enter_context(server)
            server = servers[owner]
            client = Client(entry, f"{server.address}/v1", owner, config.limits, config.retries)
            found[entry.name] = _served(client, prepared[entry.name], entry.model, server)
        else:
            url, key = entry.url.rstrip("/"), _key(entry)
            client = Client(entry, url, entry.model, config.limits, config.retries, key)
            found[entry.name] = _served(client, prepared[entry.name], entry.tokenizer, None)
    return found


def _key(entry: Endpoint) -> str:
    """Read an endpoint's API key from the environment. Raises InputError."""
    key = os.environ.get(entry.api_key_env) if entry.api_key_env else NO_KEY
    if not key:
        raise InputError(f"entry {entry.name}: the variable {entry.api_key_env} holds no key")
    return key


def _served(
    client: Client, prepared: dict[str, Prepared], model: str, server: Server | None
) -> Contestant:
    """Make a server of ours, or an endpoint, a contestant: prompts are sent as ids, or as the text
    that they are."""
    entry = client.entry
    tokenizer = tokenizer_of(model) if entry.prompt_as == "text" else None
    facts: dict[str, Any] = {"url": client.url, "stream": entry.stream}
    if server is not None:
        here = f"{Path.cwd()}{os.sep}"
        facts |= {
            "command": [part.removeprefix(here) for part in server.command],
            "environment": server.entry.env,
            **({} if server.version() is None else {"vllm": server.version()}),
            "startup_seconds": round(server.startup_seconds, 1),
        }

    def serve(prepared: Prepared, concurrency: int) -> Run:
        ids, workload = prepared.prompts, prepared.workload
        prompts = ids if tokenizer is None else [tokenizer.decode(i) for i in ids]
        # Ask before each run: a server may start and end processes.
        pids = (
            [] if server is None else [server.pid, *(child.pid for child in _children(server.pid))]
        )
        reset_peak(pids)
        run = client.run(prompts, concurrency, workload.max_new_tokens, workload.stop)
        if server is None:
            return run
        # A failed request may be the first sign of a server that is dying: given a moment, the
        # error is the server's, with its log.
        failed = any(answer.error for answer in run.answers)
        server.check(DEATH_SECONDS if failed else 0.0)
        run.peak_bytes = peak_bytes(pids)
        if not any("specul" in argument for argument in server.command):
            # Without speculation each token that the server counts took one forward.
            for answer, prompt in zip(run.answers, ids, strict=True):
                if answer.own_tokens:
                    answer.forwards = answer.own_tokens
                    answer.rows = len(prompt) + answer.own_tokens - 1
        return run

    return Contestant(facts, prepared, serve)


# Calm between two entries.


def wait_for_calm(most: float = 5.0, every: float = 0.1) -> None:
    """Wait, at most `most` seconds, until the processes that this one started compute no more: a
    server may go on for a while after its last answer, and the next entry's timed run, of a small
    model a quarter of a second, would be measured beside it."""
    end, before = time.monotonic() + most, _computed()
    while time.monotonic() < end:
        time.sleep(every)
        before, last = _computed(), before
        if before - last <= 0.02:  # a server that waits for requests computes a little
            return


def _children(pid: int | None = None) -> list[psutil.Process]:
    """List a process's descendants, by default this one's."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _computed() -> float:
    """Sum the CPU seconds of this process's descendants."""
    total = 0.0
    for child in _children():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total
