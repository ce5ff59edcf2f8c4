"""`generate` and `stream`: prompts in, results or events out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Literal, get_args

from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.base import Decoder, one_of, whole
from decode.engine import Engine
from decode.prompts import Prompt, check, encode
from decode.request import Request
from decode.result import Event, Result

DEFAULT_BATCH_SIZE = 16
OnError = Literal["raise", "return"]


def generate(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | Sequence[Decoder],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    on_error: OnError = "raise",
) -> list[Result]:
    """Decode prompts together; one `Result` a prompt, in their order.

    prompts: text, chat messages or ids, one or many. decoder: one for all, or one a prompt.
    batch_size: most requests in a forward; the tokens do not depend on it. on_error: ``raise``
    raises InputError before any work for a prompt or option that cannot be decoded, and
    RequestError (NonFiniteLogitsError for NaN) where a request fails in decoding; ``return`` lets
    each fail alone: its result has the error and no tokens, the others are what they would be.
    """
    many = as_many(prompts)
    results: list[Result | None] = [None] * len(many)
    for event in stream(model, many, decoder, batch_size=batch_size, on_error=on_error):
        if event.result is not None:
            results[event.request] = event.result
    return [result for result in results if result is not None]


def stream(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | Sequence[Decoder],
    *,
    batch_size: int = DEFAULT_BATCH_SIZE,
    on_error: OnError = "raise",
) -> Iterator[Event]:
    """The same, as events: one for each request after each forward, the last with its result."""
    whole("batch_size", batch_size)
    one_of("on_error", on_error, get_args(OnError))
    many = as_many(prompts)
    decoders = [decoder] * len(many) if isinstance(decoder, Decoder) else list(decoder)
    if len(decoders) != len(many):
        raise InputError(f"expected one decoder or {len(many)}, got {len(decoders)}")
    requests, refused = [], []
    for i, (prompt, chosen) in enumerate(zip(many, decoders, strict=True)):
        try:
            requests.append(_request(model, i, prompt, chosen))
        except InputError as error:
            if on_error == "raise":
                raise
            refused.append(Event(i, 0, [], result=Result.failed(error)))
    return _run(model, requests, refused, batch_size, on_error)


def _request(model: DiffusionModel, i: int, prompt: Prompt, decoder: Decoder) -> Request:
    decoder.check(model.contract)
    if decoder.stop and model.tokenizer is None:
        raise InputError(f"stop strings need a tokenizer, {model.path} has none")
    ids = encode(model, prompt, f"prompt {i}")
    check(model, ids, decoder, f"prompt {i}")
    return Request(i, ids, decoder, model.contract, model.tokenizer)


def _run(
    model: DiffusionModel,
    requests: list[Request],
    refused: list[Event],
    batch_size: int,
    on_error: OnError,
) -> Iterator[Event]:
    yield from refused
    sizes = sorted((request.session.slots for request in requests), reverse=True)
    engine = Engine(model, batch_size=batch_size, slots=max(1, sum(sizes[:batch_size])))
    for request in requests:
        engine.submit(request)
    for event in engine.run():
        if event.error is not None and on_error == "raise":
            raise type(event.error)(f"prompt {event.request}: {event.error}") from event.error
        yield event


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or many were given."""
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts)
    alone = bool(many) and isinstance(many[0], Mapping | Integral)  # messages, or ids
    return [many] if alone else many  # type: ignore[list-item,return-value]
