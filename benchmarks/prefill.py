"""python -m benchmarks.prefill --shape small --prompt 4000 --rows 128 512

What a long prompt costs the requests that run: some are decoding, a prompt of 4,000 tokens comes,
and the largest gap between two tokens of one of them is taken until the long one has its first
token. A model of random weights (`benchmarks.shapes`) under each decoder's own mask, the prompt fed
whole and in pieces (`Engine(prefill_rows=...)`). Printed are medians over the repetitions:

    before   largest gap before the prompt came, ms
    gap      largest gap while it entered, ms
    rows     most rows, of all requests, that were fed in such a gap
    first    from the long prompt's arrival to its first token, ms
    calls    forwards of the long request until then

A decoder whose prompt sees all of itself (d2f) cannot have it cut: its gap stays as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import decode
from benchmarks.decode_step import memory_needed
from benchmarks.shapes import SHAPES, build, check_fits
from benchmarks.timing import about
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.model import DiffusionModel
from decode.decoders import Decoder
from decode.engine.engine import Engine
from decode.engine.request import Request

DECODERS: dict[str, tuple[Callable[[int], Decoder], dict[str, Any]]] = {
    "autoregressive": (
        lambda length: decode.Autoregressive(length),
        {"family": "causal", "prompt_rule": "causal", "mask_id": None},
    ),
    "block": (
        lambda length: decode.Block(max_new_tokens=length),
        {"family": "sdar", "prompt_rule": "block_causal"},
    ),
    "d2f": (lambda length: decode.D2F(32, max_new_tokens=length), {"block_size": 32}),
}
"""Each with what its model's contract says."""
SHORT = 64  # tokens of the other prompts
QUIET = 16  # forwards before the long prompt comes, after as many that are not counted


class Watch:
    """The gaps between two tokens of those who run while a context lasts: the largest, in seconds,
    and the most rows that were fed in one."""

    def __init__(self, engine: Engine, requests: Sequence[Request], running: Sequence[Request]):
        self.engine, self.requests = engine, requests
        self.seconds, self.most = 0.0, 0
        self._rows = 0  # fed so far
        self._last = {request.index: (time.perf_counter(), 0) for request in running}

    def advance(self) -> None:
        """One forward, and the gaps that end with it."""
        events = self.engine.advance()
        now = time.perf_counter()
        self._rows += sum(self.requests[event.request].calls[-1][0] for event in events)
        for event in events:
            if event.revealed and event.request in self._last:
                began, rows = self._last[event.request]
                self.seconds = max(self.seconds, now - began)
                self.most = max(self.most, self._rows - rows)
                self._last[event.request] = (now, self._rows)


def measure(
    model: DiffusionModel,
    make: Callable[[int], Decoder],
    prompt: int,
    running: int,
    rows: int | None,
) -> dict[str, float]:
    """The columns that the module names."""
    draw = np.random.default_rng(0)
    pieces = 1 if rows is None else -(-(prompt + running * SHORT) // rows)
    decoder = make(8 * (2 * QUIET + pieces))  # long enough that nobody ends before
    prompts = [draw.integers(4, model.vocab_size, n).tolist() for n in [SHORT] * running + [prompt]]
    requests = [Request(i, ids, decoder, model.contract, None) for i, ids in enumerate(prompts)]
    *others, late = requests
    slots = sum(request.session.slots for request in requests)
    engine = Engine(model, batch_size=len(requests), slots=slots, prefill_rows=rows)
    for request in others:
        engine.submit(request)
    while engine.forwards < QUIET or not all(request.session.revealed for request in others):
        engine.advance()
    before = Watch(engine, requests, others)
    for _ in range(QUIET):
        before.advance()
    engine.submit(late)
    during, came = Watch(engine, requests, others), time.perf_counter()
    while not late.session.revealed:
        during.advance()
    first, calls = time.perf_counter() - came, len(late.calls)
    during.advance()  # those of whom nothing was revealed in the last one
    return {
        "before": 1e3 * before.seconds,
        "gap": 1e3 * during.seconds,
        "rows": during.most,
        "first": 1e3 * first,
        "calls": calls,
    }


def contract_of(model: DiffusionModel, facts: dict[str, Any]) -> DiffusionModel:
    """The same weights under another mask; no token ends a response."""
    return DiffusionModel(model.backbone, replace(model.contract, end_ids=(), **facts))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", choices=SHAPES, default="LLaDA-8B" if cuda else "small")
    parser.add_argument("--decoders", nargs="+", choices=DECODERS, default=list(DECODERS))
    parser.add_argument("--prompt", type=int, default=4000, help="tokens (default 4000)")
    parser.add_argument("--running", type=int, default=4, help="requests that run (default 4)")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[128, 512], help="prefill_rows, beside whole prompts"
    )
    parser.add_argument("--dtype", default="bfloat16" if cuda else "float32")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    options = parser.parse_args(arguments)
    device, dtype = "cuda" if cuda else "cpu", getattr(torch, options.dtype)
    most = SHAPES[options.shape]().max_position_embeddings // 2
    try:
        if min(options.prompt, options.running, options.repeat, *options.rows) < 1:
            raise InputError("expected at least 1 for prompt, running, rows and repeat")
        if options.prompt > most:
            raise InputError(f"expected a prompt of at most {most} tokens, got {options.prompt}")
        needed = memory_needed(options.shape, dtype, options.running, 2 * options.prompt, device)
        check_fits({options.shape: needed}, device)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    built = build(options.shape, dtype, device)
    facts = {
        **about(options.dtype),
        "transformers": transformers.__version__,
        "shape": options.shape,
        "prompt": options.prompt,
        "running": options.running,
        "repeat": options.repeat,
        "counted": "largest gap between two tokens of a running request, median of the repetitions",
    }
    print(
        f"{options.shape}, {facts['device']}, {options.dtype}, torch {facts['torch']}; a prompt of "
        f"{options.prompt}, {options.running} requests that run, {options.repeat} repetitions"
    )
    columns = ("before", "gap", "rows", "first", "calls")
    print(f"{'decoder':<16}{'prefill_rows':>12}" + "".join(f"{c:>10}" for c in columns))
    table = []
    for name in options.decoders:
        make, contract = DECODERS[name]
        model = contract_of(built, contract)
        for rows in (None, *options.rows):
            runs = [
                measure(model, make, options.prompt, options.running, rows)
                for _ in range(options.repeat)
            ]
            found = {column: statistics.median(run[column] for run in runs) for column in columns}
            table.append({"decoder": name, "prefill_rows": rows, **found})
            line = f"{name:<16}{rows or 'whole':>12}"
            print(line + "".join(f"{found[column]:>10.0f}" for column in columns), flush=True)
    if options.json is not None:
        write_beside(options.json, json.dumps({**facts, "measured": table}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
