"""Run the entries that decode in a process of this command: a decoder of this project, and
`generate` of transformers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import d2f
from d2f.checkpoint import base_of_adapter, folder_of, stored, weight_files
from d2f.device import parse_device, parse_dtype
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.models import resolve
from d2f.quiet import quiet
from d2f.tokenizer import load_tokenizer
from decode.api import stream
from decode.compare.config import Ours, Transformers, Workload, named
from decode.compare.results import Answer, Run
from decode.decoders import Decoder
from decode.report import peak_bytes, reset_peak
from decode.step import Event

Local = Ours | Transformers


@dataclass(frozen=True)
class Prepared:
    """Hold a workload's prompts as an entry takes them, and the decoder of one of ours."""

    workload: Workload
    prompts: list[list[int]]
    decoder: Decoder | None = None

    def first(self, count: int) -> Prepared:
        """Return the same with the first prompts alone."""
        return replace(self, prompts=self.prompts[:count])


def tokenizer_of(name: str) -> Any:
    """Load the tokenizer of a folder, hub name or bundled model, and nothing else of it. Raises
    InputError."""
    try:
        place = resolve(name)
        tokenizer = load_tokenizer(resolve(base_of_adapter(place) or place))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: text cannot be sent or counted")
    return tokenizer


# A decoder of this project.


class OursRunner:
    """Loads the model and merges its adapter, or takes one that another entry has made ready.
    Raises InputError.

    facts: what the report says of the entry.
    """

    def __init__(self, entry: Ours, model: DiffusionModel | None = None):
        self.entry, self.model = entry, model or _load(entry)
        self.facts: dict[str, Any] = {
            **_machine(self.model.device, self.model.threads),
            "dtype": self.model.precision,
            "compiled": entry.compile,
        }

    def run(self, prepared: Prepared, concurrency: int) -> Run:
        """Answer prompts, `concurrency` at any time as `Client` does: a request counts as submitted
        when one before it is answered."""
        assert prepared.decoder is not None
        answers = [Answer(i) for i in range(len(prepared.prompts))]
        waiting = iter(answers[concurrency:])
        began = time.perf_counter()
        events = stream(
            self.model,
            prepared.prompts,
            prepared.decoder,
            batch_size=min(self.entry.batch_size or concurrency, concurrency),
            max_rows=self.entry.max_rows,
            views=False,
        )
        for event in events:
            now = time.perf_counter() - began
            self._note(answers[event.request], event, now)
            if event.result is not None and (following := next(waiting, None)) is not None:
                following.submitted = now
        return Run(answers, time.perf_counter() - began, calls=events.forwards)

    def _note(self, answer: Answer, event: Event, now: float) -> None:
        if event.forward == 1:
            ends = [i for i, t in enumerate(event.settled) if t in self.model.end_ids]
            answer.prefill = now
            answer.first_tokens = ends[0] if ends else len(event.settled)
        # An empty answer has no first token; its end is the first thing to see.
        if answer.first is None and (event.settled or event.result is not None):
            answer.first = now
        if (result := event.result) is not None:
            answer.finished, answer.text = now, result.text or ""
            answer.forwards, answer.counts = result.forwards, result.counts
            answer.rows = sum(rows for rows, _ in result.calls)
            # The end id was generated too, though it is not shown.
            answer.own_tokens = len(result.tokens) + (result.finish_reason == "end")


def _load(entry: Ours) -> DiffusionModel:
    """Load the entry's model, merge its adapter (beside the weights it costs matrix products in
    every layer) and compile it."""
    import torch

    model = d2f.load(
        entry.model,
        adapter=entry.adapter,
        family=entry.family,
        dtype=entry.dtype,
        device=entry.device,
        quantize=entry.quantize,
        # Not what suits a busy machine: another entry's server may just have been started.
        threads=entry.threads or torch.get_num_threads(),
    )
    model.merge_adapter()
    if entry.compile:
        model.compile()
    return model


def _machine(device: Any, threads: int) -> dict[str, Any]:
    import torch

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "threads": None if cuda else threads,
    }


# `generate` of transformers: static batches, nothing enters before all are done.


class TransformersRunner:
    """Loads the model as AutoModelForCausalLM with its own attention. Raises InputError.

    An answer is there when `generate` returns, which is when its whole batch is done; its first
    token is there after the first forward.
    """

    def __init__(self, entry: Transformers):
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
        self.drafts = entry.prompt_lookup
        self.tokenizer = tokenizer_of(entry.model)
        ends = self.model.generation_config.eos_token_id
        self.ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
        if not self.ends:
            raise InputError(f"entry {entry.name}: {entry.model} names no end token")
        self.facts: dict[str, Any] = {
            **_machine(self.device, torch.get_num_threads()),
            "dtype": str(dtype).removeprefix("torch."),
            "attention": self.model.config._attn_implementation,
        }

    def run(self, prepared: Prepared, concurrency: int) -> Run:
        """Answer prompts in batches of `concurrency`."""
        prompts = prepared.prompts
        answers = [Answer(i) for i in range(len(prompts))]
        calls, concurrency = 0, 1 if self.drafts else concurrency
        began = time.perf_counter()
        for start in range(0, len(prompts), concurrency):
            part = slice(start, start + concurrency)
            calls += self._batch(prompts[part], answers[part], prepared.workload, began)
        return Run(answers, time.perf_counter() - began, calls=calls)

    def _batch(
        self, prompts: list[list[int]], answers: list[Answer], workload: Workload, began: float
    ) -> int:
        """Fill in the answers of one batch; return the calls of the model."""
        import torch
        from torch.nn.utils.rnn import pad_sequence
        from transformers import StoppingCriteriaList

        sent = time.perf_counter() - began
        ids = [torch.tensor(prompt) for prompt in prompts]
        left: dict[str, Any] = {"batch_first": True, "padding_side": "left"}
        padded = pad_sequence(ids, padding_value=self.ends[0], **left)  # [rows, width]
        seen = pad_sequence([torch.ones_like(row) for row in ids], **left)
        steps: list[float] = []  # when each ended

        def note(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            """Note the time of a step; stop nothing."""
            steps.append(time.perf_counter() - began)
            return torch.zeros(len(prompts), dtype=torch.bool, device=input_ids.device)

        stop = {"stop_strings": list(workload.stop), "tokenizer": self.tokenizer}
        with torch.inference_mode():
            out = self.model.generate(
                padded.to(self.device),
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
                stopping_criteria=StoppingCriteriaList([note]),
                prompt_lookup_num_tokens=self.drafts,
                **(stop if workload.stop else {}),
            ).cpu()
        rows = out[:, padded.shape[1] :].tolist()
        for answer, prompt, row in zip(answers, prompts, rows, strict=True):
            end = next((i for i, token in enumerate(row) if token in self.ends), None)
            visible = row if end is None else row[:end]
            answer.text = self.tokenizer.decode(visible, skip_special_tokens=True)
            # A row that has ended is fed padding until its batch has; that is not its own.
            answer.own_tokens = len(visible) + (end is not None)
            answer.forwards = len(steps) if self.drafts else answer.own_tokens
            if not self.drafts:  # else nothing says how many were
                answer.rows = len(prompt) + answer.own_tokens - 1  # the last is not fed
            answer.submitted, answer.first_tokens = sent, 1
            answer.prefill = answer.first = steps[0]
        done = time.perf_counter() - began
        for answer in answers:
            answer.finished = done
        return len(steps)


# A process of its own for each local entry, or for several that share a model: its memory is its
# own, and one that is not being measured holds no thread of another.


class Worker:
    """A process for one entry, or for several that all use the first one's model.

    facts: what the report says of each, by name. verbose: the process shows what other libraries
    say. Raises InputError where the process fails, in any method.
    """

    def __init__(self, entries: Sequence[Local], verbose: bool = False):
        self.name = entries[0].name
        # Spawned: a forked process would begin with this one's pages in the memory that is
        # measured, and could not use CUDA where this one has.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(verbose,))
        self._entries = entries
        self.facts: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Worker:
        try:
            self.facts = self._ask(_load_runners, self._entries)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            for process in list((self._pool._processes or {}).values()):
                process.kill()  # it may be in the middle of a run
        self._pool.shutdown(cancel_futures=True)

    def run(self, name: str, prepared: Prepared, concurrency: int) -> Run:
        """Answer prompts with the entry of that name."""
        run: Run = self._ask(_run, name, prepared, concurrency)
        return run

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in the process and return what it returns."""
        try:
            return self._pool.submit(function, *arguments).result()
        except InputError:
            raise
        except BrokenProcessPool as error:
            raise InputError(
                f"entry {self.name}: its process ended, perhaps killed for want of memory"
            ) from error
        except Exception as error:  # its cause is the traceback there, as text
            raise InputError(f"entry {self.name} failed: {error.__cause__ or error!r}") from error


# In the process itself.

_runners: dict[str, OursRunner | TransformersRunner] = {}
_life = ExitStack()  # of what lasts as long as the process


def _begin(verbose: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _life.enter_context(quiet(verbose))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()  # returns also where it was killed
    os._exit(1)


def _load_runners(entries: Sequence[Local]) -> dict[str, dict[str, Any]]:
    model: DiffusionModel | None = None
    for entry in entries:
        with named(entry):
            if isinstance(entry, Ours):
                runner = _runners[entry.name] = OursRunner(entry, model)
                model = runner.model  # in memory once
            else:
                _runners[entry.name] = TransformersRunner(entry)
    return {name: runner.facts for name, runner in _runners.items()}


def _run(name: str, prepared: Prepared, concurrency: int) -> Run:
    import torch

    runner = _runners[name]
    cuda = torch.cuda.is_available() and runner.facts["device"] != "cpu"
    # The peak counts from what is held when a run begins (the model), not from loading it.
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    else:
        reset_peak([os.getpid()])
    run = runner.run(prepared, concurrency)
    run.peak_bytes = torch.cuda.max_memory_allocated() if cuda else peak_bytes([os.getpid()])
    return run
