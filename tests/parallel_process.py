"""python tests/parallel_process.py JOBS.json

One of the processes that hold models together, started by test_tensor_parallel.py with torchrun's
environment. Rank 0 decodes with each model in parts and with the same one whole, writes what
differs beside JOBS.json, and decodes on until it is killed; the other follows it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from every_decoder import KINDS

import d2f
import decode
from d2f.device import rank
from d2f.errors import InputError
from d2f.model import DiffusionModel
from d2f.tensor_parallel import _models, follow
from decode.decoders import Decoder
from decode.engine.engine import Engine
from decode.engine.request import Request

PROMPTS = [[5, 6, 7, 8, 9], [9, 8, 7], [5, 6, 7, 8, 9, 10, 11]]


def compare(parts: DiffusionModel, whole: DiffusionModel, decoders: list[Decoder]) -> list[str]:
    """Decoders whose tokens or forwards differ between the two, batched and sampled too."""
    differ = []
    for decoder in decoders:
        one, other = (decode.generate(m, PROMPTS, decoder) for m in (parts, whole))
        if [(r.raw_tokens, r.calls) for r in one] != [(r.raw_tokens, r.calls) for r in other]:
            differ.append(repr(decoder))
    return differ


def eventful(model: DiffusionModel, decoder: Decoder) -> list[object]:
    """What an engine gives that copies prefixes, feeds prompts in pieces, loses a request to an
    error and another one to whoever cancels it."""
    engine = Engine(model, batch_size=4, slots=96, reuse_prefixes=True, prefill_rows=4)
    prompts = enumerate([*PROMPTS, PROMPTS[0]])
    requests = [Request(i, ids, decoder, model.contract, None) for i, ids in prompts]
    requests[1].session.accept = None  # type: ignore[method-assign,assignment]
    for request in requests[:3]:
        engine.submit(request)
    events = engine.advance() + engine.advance()
    engine.cancel(requests[2])
    events += list(engine.run())
    engine.submit(requests[3])  # begins as one that is done
    events += list(engine.run())
    told = [(e.request, e.forward, str(e.error), e.settled, e.call) for e in events]
    return [*told, engine.prefixes.reused_rows]


def refusals(model: DiffusionModel) -> list[str]:
    """What a model in parts says it cannot."""
    said = []
    for what in (model.compile, lambda: model.save("x"), lambda: model.forward(None, None)):
        try:
            what()
        except InputError as error:
            said.append(str(error))
    return said


def run(jobs: dict) -> dict:
    # Double precision: sums in another order still give every bit of the confidences in fp32.
    loaded = {
        name: d2f.load(folder, adapter=adapter, dtype=torch.float64, tensor_parallel=2)
        for name, (folder, _, adapter) in jobs["models"].items()
    }
    if rank():
        follow()
        return {}
    results: dict = {"differ": {}}
    for name, (folder, kind, adapter) in jobs["models"].items():
        parts = loaded[name]
        whole = d2f.load(folder, adapter=adapter, dtype=torch.float64)
        whole.merge_adapter()
        decoders = [d for d in KINDS[kind][1] if _fits(d, parts)]
        if name != kind:  # another shape of a model that has run all of them
            decoders = decoders[::4]
        results["differ"][name] = [len(decoders), compare(parts, whole, decoders)]
        if kind == "causal":
            results["eventful"] = [eventful(m, decoders[1]) for m in (parts, whole)]
            results["refused"] = refusals(parts)
        if name == jobs["show"]:
            results["shown"] = repr(parts)
            heads = parts.new_cache(3).layers[0][0].shape[1]
            results["heads"] = [heads, parts.backbone.config.num_key_value_heads]
            results["adapted"] = parts.is_adapted
    return results


def _fits(decoder: Decoder, model: DiffusionModel) -> bool:
    try:
        decoder.check(model.contract)
    except InputError:
        return False
    return True


def main() -> None:
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    results = run(json.loads(place.read_text()))
    if rank() == 0:
        beside = place.with_suffix(".part")
        beside.write_text(json.dumps(results))
        beside.rename(place.with_suffix(".result"))
        while True:  # until the test kills this process
            decode.generate(_models[0], PROMPTS, "d2f")


if __name__ == "__main__":
    main()
