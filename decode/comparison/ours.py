"""An entry of this project: a model and a decoder in the engine."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import Any

import d2f
from d2f.model import DiffusionModel
from decode.commands.decoder_settings import DecoderSettings
from decode.comparison.answers import Answer, Run
from decode.comparison.comparison_config import Ours, decoder_settings
from decode.comparison.workload import Workload
from decode.decoders import Decoder, spelled
from decode.engine.engine import Engine
from decode.engine.prompts import check, encode
from decode.engine.request import Request


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
                name: {"decoder": spelled(type(d)), **asdict(d)}
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
