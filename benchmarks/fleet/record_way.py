"""Records a way to decode: each request's forwards, and what forwards of several requests take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import d2f
from benchmarks.fleet.forward_time import ForwardTime, fitted
from benchmarks.fleet.recording import Recording, Trace
from benchmarks.forward import engine_of
from d2f.config import read_mapping
from d2f.model import DiffusionModel
from d2f.shipped import DECODING, find_config
from d2f.tasks import find_task
from decode.cli import DecoderSettings, split
from decode.decoders import Decoder, spelled
from decode.decoders.base import common_options, options_of
from decode.engine.request import Request
from decode.jobs import draw_problems, encode_problems
from decode.report import environment


@dataclass(frozen=True)
class Way:
    """A model and how it is decoded. config: its decoder's options, by the task; None: those that
    the model has by default."""

    name: str
    model: str
    config: str | None = None


WAYS = (
    Way("D2F", "tiny-d2f", "tiny-d2f-{task}"),  # as `python -m decode.tune` chose
    Way("WeDLM", "tiny-wedlm"),
    Way("autoregressive", "tiny-ar"),
)
Measured = tuple[int, int, int, float]  # of a forward: rows, slots cached, requests, ms


def record(
    way: Way, task_name: str, problems: int, most: int, *, compiled: bool
) -> tuple[Recording, list[tuple[int, float, float]]]:
    """The recording, and for each batch size up to `most` the mean milliseconds of its forwards:
    measured, and as the recording says. Needs scipy. Raises InputError."""
    task = find_task(task_name)
    config = way.config and way.config.format(task=task_name)
    path = config and find_config(config, *DECODING)
    name, given = split(read_mapping(path), str(path)) if path else (None, {})
    model = d2f.load(way.model)
    decoder = DecoderSettings(name, given).for_task(model, task)
    drawn = draw_problems(task, "heldout", problems)
    prompts = encode_problems(model, drawn, decoder)
    if compiled:
        model.compile()
    decode_together(model, prompts[:most], decoder, most)  # pays for what is done only once
    sizes = sorted({most, *(2**n for n in range(most.bit_length() - 1))})
    by_size: dict[int, list[Measured]] = {}
    traces: list[Trace] = []
    for size in sizes:
        requests, shown, by_size[size] = decode_together(model, prompts, decoder, size)
        if size == 1:
            for request, visible, problem in zip(requests, shown, drawn, strict=True):
                assert request.result is not None and request.result.text is not None
                calls = zip(request.result.calls, visible, strict=True)
                traces.append(
                    Trace(
                        prompt=tuple(prompts[request.index]),
                        text=request.result.text,
                        right=task.right(problem, request.result.text),
                        forwards=tuple((rows, cached, seen) for (rows, cached), seen in calls),
                    )
                )
    fit = fitted([forward for found in by_size.values() for forward in found])
    # Greedy, as every request of the check is; the length is said beside.
    left = {*common_options(), "max_new_tokens"}
    own = [o.name for o in options_of(type(decoder)) if o.name not in left]
    values = {option: getattr(decoder, option) for option in own}
    about: dict[str, Any] = {
        **environment(model),
        "task": task_name,
        "split": "heldout",
        "counted": "a forward: all of Engine.advance; a token: visible, and settled",
    }
    recording = Recording(
        name=way.name,
        model=way.model,
        # A request says nothing of what is not set.
        options={
            "decoder": spelled(type(decoder)),
            **{option: value for option, value in values.items() if value is not None},
        },
        max_new_tokens=decoder.length,
        about=about,
        time=fit,
        traces=tuple(traces),
    )
    return recording, [(size, *_means(found, fit)) for size, found in by_size.items()]


def decode_together(
    model: DiffusionModel, prompts: Sequence[list[int]], decoder: Decoder, size: int
) -> tuple[list[Request], list[list[int]], list[Measured]]:
    """Decode the prompts, at most `size` together: the requests, of each the visible tokens after
    every forward, and the forwards."""
    requests = [
        Request(i, ids, decoder, model.contract, model.tokenizer) for i, ids in enumerate(prompts)
    ]
    engine = engine_of(model, requests, size)
    shown: list[list[int]] = [[] for _ in requests]
    measured: list[Measured] = []
    while engine.waiting or engine.running:
        began = time.perf_counter()
        events = engine.advance()
        took = 1e3 * (time.perf_counter() - began)
        for event in events:
            if event.error is not None:
                raise event.error
            ends = (n for n, t in enumerate(event.settled) if t in model.contract.end_ids)
            shown[event.request].append(next(ends, len(event.settled)))
        rows, cached = (sum(part) for part in zip(*(e.call for e in events), strict=True))
        measured.append((rows, cached, len(events), took))
    return requests, shown, measured


def _means(measured: Sequence[Measured], fit: ForwardTime) -> tuple[float, float]:
    """Mean milliseconds of forwards, and of what the fit says of them."""
    by_rows = fit.by_rows(max(rows for rows, *_ in measured))
    said = sum(
        by_rows[rows] / 1e6 + fit.cached_ms * cached + fit.request_ms * requests
        for rows, cached, requests, _ in measured
    )
    return sum(ms for *_, ms in measured) / len(measured), said / len(measured)
