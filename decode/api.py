"""`generate` and `stream`: prompts in, results or events out."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import repeat
from typing import Any, Literal, get_args

from d2f.errors import InputError, repr_of
from d2f.model import DiffusionModel
from decode.decoders import Decoder, as_decoder
from decode.decoders.base import boolean, one_of, whole_number
from decode.engine.engine import Engine, default_slots
from decode.engine.prompts import Prompt, as_many, checked
from decode.engine.request import Request
from decode.report import doubt_of, empty_notice
from decode.step import Event, Result

DEFAULT_BATCH_SIZE = 16
OnError = Literal["raise", "return"]
Decoders = Decoder | str | Iterable[Decoder | str]


def generate(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
    decoder: Decoders | None = None,
    *,
    n: int = 1,
    raw: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_rows: int | None = None,
    on_error: OnError = "raise",
) -> list[Result]:
    """Decode prompts together; returns n `Result` a prompt, prompt after prompt.

    prompts: text, chat messages (a list of them, or one alone) or ids, one or many. Text is a user
        message where the tokenizer has a chat template, with raw it is taken as it is. An iterator
        is drawn from as requests enter.
    decoder: one for all, or one a prompt; a name (``"d2f"``) is that decoder with its defaults;
        None is the one that suits the model.
    n: samples of each prompt. At a temperature each has a seed of its own, made from the decoder's
        seed, the number of the sample and, where the decoder is one for all, that of the prompt
        (`decode.step.sample_seed`): equal prompts give different answers, the same call the same
        ones. The first sample of the first prompt, or of a prompt with a decoder of its own, has
        the decoder's seed as it is; `Result.seed` says which one it was.
    batch_size: most requests in a forward; the tokens do not depend on it.
    max_rows: rows that a forward should have, which bounds how wide lossless decoders speculate
        (`decode.engine.engine.Engine`); the tokens do not depend on it.
    on_error: ``raise`` raises InputError for a prompt or option that cannot be decoded, before any
        work unless prompts come from an iterator, and RequestError (NonFiniteLogitsError for NaN)
        where a request fails in decoding; ``return`` lets each fail alone: its result has the error
        and no tokens, the others are what they would be.
    """
    events = Events(model, prompts, decoder, n, raw, batch_size, max_rows, on_error, views=False)
    found = {event.request: event.result for event in events if event.result is not None}
    results = [found[i] for i in sorted(found)]
    empty = [result for result in results if not result.tokens and result.error is None]
    longest = max((len(result.raw_tokens) for result in empty), default=0)
    if (notice := empty_notice(model, len(empty), longest)) is not None:
        warnings.warn(notice, stacklevel=2)
    return results


def stream(
    model: DiffusionModel,
    prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
    decoder: Decoders | None = None,
    *,
    n: int = 1,
    raw: bool = False,
    batch_size: int = DEFAULT_BATCH_SIZE,
    max_rows: int | None = None,
    on_error: OnError = "raise",
    views: bool = True,
) -> Events:
    """Decode as `generate` does, as events: one for each request after each forward, the last with
    its result. views: events show their blocks, which costs time in each forward."""
    return Events(model, prompts, decoder, n, raw, batch_size, max_rows, on_error, views=views)


class Events(Iterator[Event]):
    """The events of `stream`. `Event.request` is n times the number of the prompt plus that of the
    sample. forwards: calls of the model so far."""

    def __init__(
        self,
        model: DiffusionModel,
        prompts: Prompt | Sequence[Prompt] | Iterator[Prompt],
        decoder: Decoders | None,
        n: int,
        raw: bool,
        batch_size: int,
        max_rows: int | None,
        on_error: OnError,
        *,
        views: bool,
    ):
        if not isinstance(model, DiffusionModel):
            raise InputError(f"expected a model, as d2f.load(...) gives it, got {repr_of(model)}")
        whole_number("n", n)
        boolean("raw", raw)
        whole_number("batch_size", batch_size)
        one_of("on_error", on_error, get_args(OnError))
        self._model, self._n, self._raw, self._views = model, n, raw, views
        self._raise = on_error == "raise"
        self._notice: str | None = None
        self._shared = isinstance(decoder, str | Decoder) or not isinstance(decoder, Iterable)
        given: Any = repeat(decoder) if self._shared else decoder
        if not isinstance(prompts, Iterator):
            prompts = as_many(prompts)
            if not self._shared and len(given := list(given)) != len(prompts):
                raise InputError(f"expected one decoder or {len(prompts)}, got {len(given)}")
        pairs = enumerate(zip(prompts, given, strict=False))
        made = (one for i, pair in pairs for one in self._requests(i, *pair))
        if isinstance(prompts, Iterator):
            slots = default_slots(model, batch_size)
        else:
            found = list(made)  # the checks are made at the call, not at the first event
            # Room for the largest requests at once: only the batch size makes a request wait.
            sizes = [one.session.slots for one in found if isinstance(one, Request)]
            slots = sum(sorted(sizes, reverse=True)[:batch_size])
            made = (one for one in found)
            if self._notice is not None:
                warnings.warn(self._notice, stacklevel=3)
        self._engine = Engine(model, batch_size=batch_size, slots=max(1, slots), max_rows=max_rows)
        self._events: Generator[Event, None, None] = self._run(made)

    @property
    def forwards(self) -> int:
        return self._engine.forwards

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Drop what still runs."""
        self._events.close()

    def _requests(
        self, i: int, prompt: Prompt, chosen: Decoder | str | None
    ) -> list[Request | Event]:
        """Make the requests of a prompt, or the events that say why it cannot be decoded."""
        model = self._model
        places = range(i * self._n, (i + 1) * self._n)
        decoder = as_decoder(chosen, model.contract)
        try:
            ids, decoder = checked(model, prompt, decoder, f"prompt {i}", raw=self._raw)
        except InputError as error:
            if self._raise:
                raise
            return [Event(place, 0, [], result=Result.failed(error)) for place in places]
        self._notice = self._notice or doubt_of(model, decoder)
        # Prompts that share a decoder get different seeds, one's own decoder is taken as it is.
        samples = [decoder.sampled(i if self._shared else 0, sample) for sample in range(self._n)]
        return [
            Request(place, ids, own, model.contract, model.tokenizer, views=self._views)
            for place, own in zip(places, samples, strict=True)
        ]

    def _run(self, made: Iterator[Request | Event]) -> Generator[Event, None, None]:
        engine = self._engine
        with closing(engine):
            while True:
                # Only as many wait as may enter next: each has a session, and prompts may be many.
                while len(engine.waiting) < engine.batch_size:
                    one = next(made, None)
                    if one is None:
                        break
                    if isinstance(one, Event):
                        yield one  # nothing is decoded for it
                    else:
                        engine.submit(one)
                if not engine.busy:
                    return
                for event in engine.advance():
                    if self._raise and event.result is not None and event.error is not None:
                        where = f"prompt {event.request // self._n}"
                        raise type(event.error)(f"{where}: {event.error}") from event.error
                    yield event
