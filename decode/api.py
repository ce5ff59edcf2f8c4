"""`generate` and `stream`: prompts in, results or events out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Literal, get_args

from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders import Decoder, as_decoder
from decode.decoders.base import boolean, one_of, whole_number
from decode.engine.engine import Engine
from decode.engine.prompts import Prompt, as_many, checked
from decode.engine.request import Request
from decode.report import doubt_of
from decode.step import Event, Result

DEFAULT_BATCH_SIZE = 16
OnError = Literal["raise", "return"]


def generate(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | str | Sequence[Decoder | str],
    *,
    n: int = 1,
    raw: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    on_error: OnError = "raise",
) -> list[Result]:
    """Decode prompts together; n `Result` a prompt, prompt after prompt.

    prompts: text, chat messages (a list of them, or one alone) or ids, one or many. Text is a user
    message where the tokenizer has a chat template, with raw it is taken as it is. decoder: one
    for all, or one a prompt; a name (``"d2f"``) is that decoder with its defaults. n: samples of
    each prompt. At a temperature each sample has a seed of its own, made from the decoder's seed,
    the number of the sample and, where the decoder is one for all, that of the prompt
    (`decode.step.sample_seed`): equal prompts give different answers, the same
    call the same ones. The first sample of the first prompt, or of a prompt with a decoder of its
    own, has the decoder's seed as it is; `Result.seed` says which one it was.
    batch_size: most requests in a forward; the tokens do not depend on it. on_error: ``raise``
    raises InputError before any work for a prompt or option that cannot be decoded, and
    RequestError (NonFiniteLogitsError for NaN) where a request fails in decoding; ``return`` lets
    each fail alone: its result has the error and no tokens, the others are what they would be.
    """
    results: dict[int, Result] = {}
    events = _begin(model, prompts, decoder, n, raw, batch_size, on_error, views=False)
    for event in events:
        if event.result is not None:
            results[event.request] = event.result
    return [results[i] for i in sorted(results)]


def stream(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | str | Sequence[Decoder | str],
    *,
    n: int = 1,
    raw: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    on_error: OnError = "raise",
) -> Iterator[Event]:
    """The same, as events: one for each request after each forward, the last with its result.
    `Event.request` is n times the number of the prompt plus that of the sample."""
    return _begin(model, prompts, decoder, n, raw, batch_size, on_error, views=True)


def _begin(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt],
    decoder: Decoder | str | Sequence[Decoder | str],
    n: int,
    raw: bool,
    batch_size: int,
    on_error: OnError,
    *,
    views: bool,
) -> Iterator[Event]:
    """Check everything, then the events; views: with their blocks."""
    whole_number("n", n)
    boolean("raw", raw)
    whole_number("batch_size", batch_size)
    one_of("on_error", on_error, get_args(OnError))
    many = as_many(prompts)
    shared = isinstance(decoder, str) or not isinstance(decoder, Sequence)
    given: Sequence[Decoder | str] = [decoder] if shared else decoder  # type: ignore
    decoders = [as_decoder(one, model.contract) for one in given]
    if shared:
        decoders *= len(many)
    if len(decoders) != len(many):
        raise InputError(f"expected one decoder or {len(many)}, got {len(decoders)}")
    notice = next(filter(None, (doubt_of(model, one) for one in decoders)), None)
    if notice is not None:
        warnings.warn(notice, stacklevel=3)
    requests, refused = [], []
    for i, (prompt, chosen) in enumerate(zip(many, decoders, strict=True)):
        places = range(i * n, (i + 1) * n)
        try:
            ids, chosen = checked(model, prompt, chosen, f"prompt {i}", raw=raw)
        except InputError as error:
            if on_error == "raise":
                raise
            refused += [Event(place, 0, [], result=Result.failed(error)) for place in places]
            continue
        for sample, place in enumerate(places):
            # Prompts that share a decoder get different seeds; a prompt's own decoder is taken as
            # it is.
            own = chosen.sampled(i if shared else 0, sample)
            contract, tokenizer = model.contract, model.tokenizer
            requests.append(Request(place, ids, own, contract, tokenizer, views=views))
    # `_run` is the generator: the checks above are made at the call, not at the first event.
    return _run(model, requests, refused, batch_size, on_error, n)


def _run(
    model: DiffusionModel,
    requests: list[Request],
    refused: list[Event],
    batch_size: int,
    on_error: OnError,
    n: int,
) -> Iterator[Event]:
    # Their events come first; nothing was decoded for them.
    yield from refused
    # Room for the largest requests at once, so that only the batch size makes a request wait.
    sizes = sorted((request.session.slots for request in requests), reverse=True)
    engine = Engine(model, batch_size=batch_size, slots=max(1, sum(sizes[:batch_size])))
    with closing(engine):
        for request in requests:
            engine.submit(request)
        for event in engine.run():
            if event.error is not None and on_error == "raise":
                where = f"prompt {event.request // n}"
                raise type(event.error)(f"{where}: {event.error}") from event.error
            yield event
