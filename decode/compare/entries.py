"""An entry made ready: its worker or server is up, its prompts are encoded."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import psutil

import d2f
from d2f import chat
from d2f.checkpoint import base_of_adapter, folder_of, stored, weight_files
from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from d2f.loading import load_tokenizer
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.quantize import check_quantize
from d2f.quiet import quiet
from decode.cli import DecoderSettings, outline
from decode.compare.client import Answer, Client, Run, check_endpoint, ignored_limit
from decode.compare.config import (
    AnyEntry,
    CompareConfig,
    Endpoint,
    Ours,
    Transformers,
    Vllm,
    Workload,
    decoder_settings,
)
from decode.compare.server import VllmServer, check_python
from decode.decoders import Decoder, qualified_name
from decode.engine.engine import Engine
from decode.engine.prompts import check, encode
from decode.engine.request import Request

# An entry of this project: a model and a decoder in the engine.


class OursRunner:
    """Loads the model and merges its adapter, or takes one that another entry has made ready;
    encodes the prompts. Raises InputError.

    facts: what the report says of the entry.
    """

    def __init__(self, entry: Ours, workloads: list[Workload], model: DiffusionModel | None = None):
        import torch

        self.entry = entry
        self.model = model or _load(entry)
        self.decoders: dict[str, Decoder] = {}
        self.prompts: dict[str, list[list[int]]] = {}
        for workload in workloads:
            decoder, ids = prepare(entry, workload, self.model)
            self.decoders[workload.name], self.prompts[workload.name] = decoder, ids
        cuda = self.model.device.type == "cuda"
        self.facts: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.model.device) if cuda else "cpu",
            "dtype": self.model.precision,
            "compiled": entry.compile,
            "threads": None if cuda else self.model.threads,
            "decoder": {
                name: {"decoder": qualified_name(type(d)), **asdict(d)}
                for name, d in self.decoders.items()
            },
        }

    def run(self, name: str, count: int, concurrency: int) -> Run:
        """The first `count` prompts of a workload, at most `concurrency` submitted at any time."""
        decoder, prompts = self.decoders[name], self.prompts[name][:count]
        batch = min(self.entry.batch_size or concurrency, concurrency)
        contract, tokenizer = self.model.contract, self.model.tokenizer
        # Room for the `batch` largest requests, so that none ever waits for slots.
        sizes = sorted((decoder.begin(ids, contract).slots for ids in prompts), reverse=True)
        engine = Engine(self.model, batch_size=batch, slots=sum(sizes[:batch]))
        answers = [Answer(i) for i in range(len(prompts))]
        waiting, running = deque(answers), dict[int, Request]()
        began = time.perf_counter()
        while waiting or running:
            # A closed loop, as that of `served.Client`: a new request comes when one is answered.
            while waiting and len(running) < concurrency:
                answer = waiting.popleft()
                answer.submitted = time.perf_counter() - began
                prompt = prompts[answer.item]
                request = Request(answer.item, prompt, decoder, contract, tokenizer, views=False)
                running[answer.item] = request
                engine.submit(request)
            events = engine.advance()
            now = time.perf_counter() - began
            for event in events:
                if event.error is not None:
                    raise event.error
                answer, request = answers[event.request], running[event.request]
                if answer.first is None:
                    self._first(answer, request, event.forward, now)
                if event.result is not None:
                    result = event.result
                    answer.finished, answer.text = now, result.text or ""
                    # An empty answer has no first token; its end is the first thing to see.
                    answer.first = answer.first if answer.first is not None else now
                    answer.forwards = result.forwards
                    answer.rows = sum(rows for rows, _ in result.calls)
                    answer.counts = result.counts
                    # The end id was generated too, though it is not shown.
                    answer.own_tokens = len(result.tokens) + (result.finish_reason == "end")
                    del running[event.request]
        return Run(answers, time.perf_counter() - began, calls=engine.forwards)

    def _first(self, answer: Answer, request: Request, forward: int, now: float) -> None:
        """Note the first forward, and the first token that no later one can change or precede."""
        settled = request.session.settled
        if forward == 1:
            answer.prefill = now
            ends = [i for i, t in enumerate(settled) if t in self.model.end_ids]
            answer.first_tokens = ends[0] if ends else len(settled)
        if settled:
            answer.first = now


def prepare(
    entry: Ours, workload: Workload, model: DiffusionModel
) -> tuple[Decoder, list[list[int]]]:
    """An entry's decoder and prompt ids for a workload, checked; no weights are needed for it.
    Raises InputError."""
    chosen = decoder_settings(entry, workload.task)
    settings = DecoderSettings(chosen.name, chosen.given | {"stop": workload.stop})
    decoder = settings.decoder(model, workload.max_new_tokens)
    decoder.check(model.contract)
    ids = [encode(model, item.prompt, item.id, raw=True) for item in workload.items]
    for item, prompt in zip(workload.items, ids, strict=True):
        check(model, prompt, decoder, item.id)
    return decoder, ids


def _load(entry: Ours) -> DiffusionModel:
    """The entry's model, made ready."""
    import torch

    if entry.threads is not None:
        torch.set_num_threads(entry.threads)
    model = d2f.load(
        entry.model,
        adapter=entry.adapter,
        family=entry.family,
        dtype=entry.dtype,
        device=entry.device,
        quantize=entry.quantize,
    )
    # An unmerged LoRA would cost matrix products in every layer of every forward.
    model.merge_adapter()
    if entry.compile:
        model.compile()
    return model


# Peak memory of processes: resident bytes, read where Linux tells them.


def tree(pid: int) -> list[int]:
    """A process and all that it started, and they in turn."""
    import psutil

    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def reset_peak(pids: Iterable[int]) -> None:
    """Let each process's peak begin anew."""
    for pid in pids:
        with contextlib.suppress(OSError):
            # 5 sets VmHWM, the peak, back to what is resident now (proc(5)).
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pids: Iterable[int]) -> int | None:
    """Sum of the processes' peaks (pages that two of them share count twice), None where they
    cannot be read."""
    total = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                total += int(line.split()[1]) * 1024
    return total or None


# A process of its own for each local entry, or for several that share a model: its memory is its
# own, and one that is not being measured holds no thread of another.

STOP_SECONDS = 10.0


class WorkerError(InputError):
    """An entry whose process failed; says what it said."""


Local = Ours | Transformers


class WorkerContestant:
    """One entry of a worker, as `measure` sees it."""

    def __init__(self, worker: Worker, entry: Local):
        self.entry = entry
        self.worker = worker
        self.facts: dict[str, Any] = worker.facts[entry.name]

    def run(self, workload: Workload, count: int, concurrency: int) -> Run:
        """One run in the process. Raises WorkerError."""
        return self.worker.run(self.entry.name, workload, count, concurrency)


class Worker:
    """The parent's end of a process for one entry, or several that share a model: it starts the
    process, waits until the model is loaded, and asks for one run after the other.

    entries: those that the process serves, all with the first one's model. facts: what the report
    says of each, by name. verbose: the process shows what other libraries say.
    """

    def __init__(self, entries: Sequence[Local], workloads: list[Workload], verbose: bool = False):
        self.entry = entries[0]
        # Spawned: a forked process would begin with this one's pages in the memory that is
        # measured, and could not use CUDA where this one has.
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, entries, workloads, verbose), daemon=True
        )
        self._process.start()
        # The child has its own copy; were this one open, its death would not end `recv`.
        other.close()
        self.facts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Worker:
        try:
            self.facts = self._receive()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def run(self, entry: str, workload: Workload, count: int, concurrency: int) -> Run:
        """One run of one of its entries. Raises WorkerError."""
        self._connection.send((entry, workload.name, count, concurrency))
        run: Run = self._receive()
        return run

    def stop(self) -> None:
        # `_answer` waits in `recv` between runs, meets the end of the pipe there, and returns.
        self._connection.close()
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError) as error:
            # The pipe closes a little before the process has its exit status.
            self._process.join(STOP_SECONDS)
            raise WorkerError(
                f"entry {self.entry.name}: its process ended with status "
                f"{self._process.exitcode} (-9: killed, often for memory)"
            ) from error
        # Errors cross the pipe as text: exceptions of other libraries may not unpickle here.
        if kind == "input error":
            raise InputError(value)
        if kind == "error":
            raise WorkerError(f"entry {self.entry.name} failed:\n{value}")
        return value


def _serve(
    connection: Connection, entries: Sequence[Local], workloads: list[Workload], verbose: bool
) -> None:
    """The process: load, then answer requests for runs until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    # A broken pipe: it has gone, nobody waits for an answer.
    with contextlib.suppress(BrokenPipeError), quiet(verbose):
        _answer(connection, entries, workloads)


def _answer(connection: Connection, entries: Sequence[Local], workloads: list[Workload]) -> None:
    current = entries[0].name
    try:
        import torch

        runners: dict[str, Any] = {}
        for entry in entries:
            current = entry.name
            # All but the first take the first one's model: it is in memory once.
            runners[current] = _runner(entry, workloads, next(iter(runners.values()), None))
        connection.send(("done", {name: runner.facts for name, runner in runners.items()}))
        while True:
            try:
                current, name, count, concurrency = connection.recv()
            except EOFError:
                return
            runner = runners[current]
            cuda = torch.cuda.is_available() and runner.facts["device"] != "cpu"
            # The peak counts from what is held when a run begins (the model), not from loading it.
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            else:
                reset_peak([os.getpid()])
            run = runner.run(name, count, concurrency)
            run.peak_bytes = (
                torch.cuda.max_memory_allocated() if cuda else peak_bytes([os.getpid()])
            )
            connection.send(("done", run))
    except InputError as error:
        connection.send(("input error", f"entry {current}: {error}"))
    # Not an error to send: the pipe that would take it is the one that broke.
    except BrokenPipeError:
        raise
    except Exception:  # whatever it is, the parent shows it
        connection.send(("error", traceback.format_exc()))


def _runner(entry: Local, workloads: list[Workload], before: Any) -> Any:
    """The runner of an entry; before: another one of the process, whose model it takes."""
    if isinstance(entry, Ours):
        return OursRunner(entry, workloads, None if before is None else before.model)

    return TransformersRunner(entry, workloads)


# The prompts of a workload as an entry's own tokenizer writes them.


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a folder, hub name or bundled model; nothing else of it is fetched.
    Raises InputError."""
    try:
        place = resolve(name)
        tokenizer = load_tokenizer(resolve(base_of_adapter(place) or place))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: text cannot be sent or counted")
    return tokenizer


def encode_all(tokenizer: Any, workload: Workload, name: str) -> list[list[int]]:
    """Each prompt's ids: messages through the chat template, text and ids as they are."""
    return [
        encode_entry_prompts(tokenizer, item.prompt, f"entry {name}: {item.id}")
        for item in workload.items
    ]


def encode_entry_prompts(tokenizer: Any, prompt: Any, where: str) -> list[int]:
    """One prompt's ids. Raises InputError."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt[0], int):
        return list(prompt)
    if tokenizer.chat_template is None:
        raise InputError(f"{where}: chat messages need a chat template, the tokenizer has none")
    try:
        return chat.encode(tokenizer, prompt)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def count_tokens(tokenizer: Any, texts: list[str]) -> list[int]:
    """Tokens of each text: the one rule that every entry's answers are counted by."""
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


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
        pids = tree(self.server.pid) if self.server is not None else []
        reset_peak(pids)
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
            run.peak_bytes = peak_bytes(pids)
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


# `generate` of transformers as an entry: static batches, nothing enters before all are done.


class TransformersRunner:
    """Loads the model as AutoModelForCausalLM with its own attention. Raises InputError.

    An answer is there when `generate` returns, which is when its whole batch is done; its first
    token is there after the first forward.
    """

    def __init__(self, entry: Transformers, workloads: list[Workload]):
        import torch
        from transformers import AutoModelForCausalLM

        if entry.threads is not None:
            torch.set_num_threads(entry.threads)
        self.device = parse_device(entry.device)
        dtype = parse_dtype(entry.dtype, self.device)
        place = str(folder_of(resolve(entry.model)))
        try:
            stored(weight_files(Path(place)))
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
        except (ValueError, OSError) as error:
            raise InputError(f"entry {entry.name}: {entry.model}: {error}") from error
        self.model = model.to(self.device).eval()
        self.tokenizer: Any = load_tokenizer(place)
        if self.tokenizer is None:
            raise InputError(f"entry {entry.name}: {entry.model} has no tokenizer")
        ends = self.model.generation_config.eos_token_id
        self.ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
        if not self.ends:
            raise InputError(f"entry {entry.name}: {entry.model} names no end token")
        self.workloads = {workload.name: workload for workload in workloads}
        self.prompts = {w.name: encode_all(self.tokenizer, w, entry.name) for w in workloads}
        cuda = self.device.type == "cuda"
        self.facts: dict[str, Any] = {
            "device": torch.cuda.get_device_name(self.device) if cuda else "cpu",
            "dtype": str(dtype).removeprefix("torch."),
            "threads": None if cuda else torch.get_num_threads(),
            "attention": self.model.config._attn_implementation,
        }

    def run(self, name: str, count: int, concurrency: int) -> Run:
        """The first `count` prompts of a workload in batches of `concurrency`."""
        prompts = self.prompts[name][:count]
        answers = [Answer(i) for i in range(len(prompts))]
        calls = 0
        began = time.perf_counter()
        # A static batch: the next one starts when the longest answer of this one is done.
        for first in range(0, len(prompts), concurrency):
            part = slice(first, first + concurrency)
            calls += self._batch(prompts[part], answers[part], self.workloads[name], began)
        return Run(answers, time.perf_counter() - began, calls=calls)

    def _batch(
        self, prompts: list[list[int]], answers: list[Answer], workload: Workload, began: float
    ) -> int:
        import torch
        from transformers import StoppingCriteriaList

        steps: list[float] = []
        sent = time.perf_counter() - began
        width = max(len(ids) for ids in prompts)
        ids = torch.full((len(prompts), width), self.ends[0])
        seen = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            seen[row, width - len(prompt) :] = 1
        watch = StoppingCriteriaList([_Watch(steps, began, len(prompts))])
        options: dict[str, Any] = {}
        if workload.stop:
            options = {"stop_strings": list(workload.stop), "tokenizer": self.tokenizer}
        with torch.inference_mode():
            out = self.model.generate(
                ids.to(self.device),
                attention_mask=seen.to(self.device),
                # Greedy as all entries, whatever the checkpoint's generation_config says.
                do_sample=False,
                num_beams=1,
                temperature=None,
                top_p=None,
                top_k=None,
                max_new_tokens=workload.max_new_tokens,
                eos_token_id=self.ends,
                pad_token_id=self.ends[0],
                stopping_criteria=watch,
                **options,
            ).cpu()
        texts = []
        for row in out[:, width:].tolist():
            end = next((i for i, token in enumerate(row) if token in self.ends), None)
            visible = row if end is None else row[:end]
            text = self.tokenizer.decode(visible, skip_special_tokens=True)
            # A row that has ended is fed padding until its batch has; that is not counted as its
            # own.
            texts.append((text, len(visible) + (end is not None)))
        done = time.perf_counter() - began
        for row, (answer, (text, own)) in enumerate(zip(answers, texts, strict=True)):
            answer.submitted, answer.prefill, answer.first = sent, steps[0], steps[0]
            answer.finished, answer.text, answer.own_tokens = done, text, own
            answer.first_tokens = 1
            answer.forwards = own
            # The last token is generated and not fed.
            answer.rows = len(prompts[row]) + own - 1
        return len(steps)


class _Watch:
    """A stopping criterion that never stops: it notes when each step ended."""

    def __init__(self, steps: list[float], began: float, rows: int):
        self.steps, self.began, self.rows = steps, began, rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        import torch

        self.steps.append(time.perf_counter() - self.began)
        return torch.zeros(self.rows, dtype=torch.bool, device=input_ids.device)


# Between two entries of a comparison: until what the last one leaves running is over.

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
    """Seconds that these processes have computed."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
