"""`generate` and `stream`: prompts in, results or events out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral

from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.base import Decoder, whole
from decode.engine import Engine
from decode.prompts import Prompt, check, encode
from decode.request import Request
from decode.result import Event, Result

DEFAULT_BATCH_SIZE = 16


def generate(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | Sequence[Decoder],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> list[Result]:
    """Decode prompts together; one `Result` a prompt, in their order.

    prompts: text, chat messages or ids, one or many. decoder: one for all, or one a prompt.
    batch_size: most requests in a forward; the tokens do not depend on it. Raises InputError
    before any work for a prompt or option that cannot be decoded, NonFiniteLogitsError for NaN.
    """
    many = as_many(prompts)
    results: list[Result | None] = [None] * len(many)
    for event in stream(model, many, decoder, batch_size=batch_size):
        if event.result is not None:
            results[event.request] = event.result
    return [result for result in results if result is not None]


def stream(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | Sequence[Decoder],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> Iterator[Event]:
    """The same, as events: one for each request after each forward, the last with its result."""
    whole("batch_size", batch_size)
    many = as_many(prompts)
    decoders = [decoder] * len(many) if isinstance(decoder, Decoder) else list(decoder)
    if len(decoders) != len(many):
        raise InputError(f"expected one decoder or {len(many)}, got {len(decoders)}")
    requests = []
    for i, (prompt, chosen) in enumerate(zip(many, decoders, strict=True)):
        chosen.check(model.contract)
        if chosen.stop and model.tokenizer is None:
            raise InputError(f"stop strings need a tokenizer, {model.path} has none")
        ids = encode(model, prompt, f"prompt {i}")
        check(model, ids, chosen, f"prompt {i}")
        requests.append(Request(i, ids, chosen, model.contract, model.tokenizer))
    return _run(model, requests, batch_size)


def _run(model: DiffusionModel, requests: list[Request], batch_size: int) -> Iterator[Event]:
    sizes = sorted((request.session.slots for request in requests), reverse=True)
    engine = Engine(model, batch_size=batch_size, slots=max(1, sum(sizes[:batch_size])))
    for request in requests:
        engine.submit(request)
    yield from engine.run()


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or many were given."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    alone = bool(many) and isinstance(many[0], Mapping | Integral)  # messages, or ids
    return [many] if alone else many  # type: ignore[list-item,return-value]
