"""Decode one request for text: its prompts as ids, its decoder, its choices, run together."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from d2f.errors import InputError, RustPanicError, did_you_mean, not_one_of, panics_are_errors
from decode.decoders import Decoder
from decode.decoders.base import common_options, options_of
from decode.engine.async_engine import Ticket
from decode.engine.likelihood import Likelihood
from decode.engine.prompts import Prompt, checked, encode
from decode.server.models import ServedModel
from decode.server.protocol import AnyRequest, ApiError, TextRequest, as_api_error, blaming
from decode.server.text import ResponseText
from decode.step import Event, Result, TokenLikelihood

Job = tuple[list[int], Decoder]  # a prompt's ids, and its decoder at its length


def make_jobs(
    served: ServedModel, prompts: Sequence[Prompt], decoder: Decoder, field: str, *, fixed: bool
) -> list[Job]:
    """Encode and check all prompts. Raises ApiError (400) for the first that cannot be decoded.

    field: the one that the prompts came in. fixed: the request gave the length of the response;
    otherwise it is shortened to what the context leaves.
    """
    jobs = []
    for place, prompt in enumerate(prompts):
        where = field if len(prompts) == 1 else f"{field} {place}"
        with blaming(field):
            ids, own = encode_prompt(served, prompt, where), decoder
            room = served.context_length - len(ids) - decoder.extra_positions
            if not fixed:
                usual = served.model.contract.response_length or decoder.length
                longest = decoder.max_new_tokens or usual
                length: Any = {"max_new_tokens": min(longest, max(room, 1))}
                own = replace(decoder, **length)  # a field of every decoder, not of their base
            if own.length > room:
                after = own.extra_positions
                more = f", and {after} positions after them" if after else ""
                has = f"{len(ids)} tokens and the response {own.length}{more}"
                raise _too_long(where, has, served)
            jobs.append(checked(served.model, ids, own, where, raw=True))
    return jobs


def encode_prompt(served: ServedModel, prompt: Prompt, where: str) -> list[int]:
    """Encode text as it is, and messages by the chat template. Raises InputError and ApiError; a
    text that is too long for the context whatever it says is not tokenized."""
    messages: Any = [] if isinstance(prompt, str) or not prompt else prompt
    chat = bool(messages) and isinstance(messages[0], dict)
    length = sum(len(m["content"]) for m in messages) if chat else len(prompt)
    if (chat or isinstance(prompt, str)) and length > served.most_characters:
        raise _too_long(where, f"{length} characters", served)
    try:
        with panics_are_errors():
            if not (chat and served.sanitize):
                return encode(served.model, prompt, where, raw=True)
            tokenizer: Any = served.model.tokenizer
            options: Any = {"return_dict": False, "sanitize_control_tokens": True}
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
            return list(ids)
    except InputError:
        raise
    except RustPanicError as error:
        raise InputError(f"{where}: {error}") from error
    except Exception as error:  # a template is code of the checkpoint
        raise InputError(f"{where}: the chat template refused the messages: {error}") from error


def _too_long(where: str, has: str, served: ServedModel) -> ApiError:
    return ApiError(
        400,
        f"{where} has {has}: the context of {served.name} is {served.context_length}",
        param=where.partition(" ")[0],
        code="context_length_exceeded",
    )


@dataclass(eq=False)
class Choice:
    """Collect one answer: to prompt ``index // n``, its ids, by its decoder."""

    index: int
    prompt: list[int]
    decoder: Decoder
    text: ResponseText
    calls: list[tuple[int, int]] = field(default_factory=list)
    grew: list[float] = field(default_factory=list)  # times at which more tokens became final
    result: Result | None = None

    @property
    def tokens(self) -> int:
        """Count the tokens of the response so far."""
        return self.text.settled if self.result is None else len(self.result.tokens)

    @property
    def finish_reason(self) -> str | None:
        """Return OpenAI's word; an end token and a stop string are one to it."""
        if self.result is None:
            return None
        return "length" if self.result.finish_reason == "length" else "stop"

    def take(self, event: Event) -> str:
        """Count an event and return the text that it made final. Raises its error, which ends
        nothing: what came before it stays."""
        self.calls.append(event.call)
        if event.error is not None:
            raise event.error
        self.result, before = event.result, self.text.settled
        with panics_are_errors():
            piece = self.text.take(event)
        if self.text.settled > before:
            self.grew.append(time.perf_counter())
        return piece


Take = Callable[[Choice, Event, str], None]
# The outcome of a request by the code of its error; "finished" without one.
_OUTCOMES = {"queue_full": "refused", "stopping": "cancelled", "timeout": "timeout"}


class Generation:
    """Decode the choices of a request, from the queue of the engine to their end.

    id: of the request.
    decoder: that of the request; jobs: its prompts, each with that decoder at its own length.
    scored: prompts whose likelihoods are wanted, too; they are known before the first event.
    began: when the request came, by `time.perf_counter`.
    limit: seconds that it may take.
    """

    def __init__(
        self,
        id: str,
        served: ServedModel,
        request: AnyRequest,
        decoder: Decoder,
        jobs: Sequence[Job],
        *,
        scored: Sequence[Job] = (),
        began: float,
        limit: float,
    ):
        self.id = id
        self.served = served
        self.decoder = decoder
        self.prompt_tokens = sum(len(ids) for ids, _ in jobs)
        self.n = request.n
        self.began = began
        self.created = int(time.time())
        self.outcome = "cancelled"  # until it is known to have ended otherwise
        self.error: str | None = None
        self._request = request
        self._limit = limit
        logprobs = request.tops is not None
        tokenizer = served.model.tokenizer if request.stream or logprobs else None
        end_ids = () if request.ignore_eos else served.model.end_ids
        self.choices = [
            Choice(
                p * self.n + k,
                ids,
                fitted.sampled(p, k),
                ResponseText(tokenizer, decoder.stop, end_ids, logprobs=logprobs),
            )
            for p, (ids, fitted) in enumerate(jobs)
            for k in range(self.n)
        ]
        self._scores = [
            Choice(p, ids, kind, ResponseText(None)) for p, (ids, kind) in enumerate(scored)
        ]
        self._all = [*self._scores, *self.choices]
        self._running = len(self._all)
        self._tickets: list[Ticket] = []
        self._take: Take = lambda *_: None
        self._held: list[tuple[Choice, Event, str]] = []  # until the likelihoods are known
        self._ended = asyncio.get_running_loop().create_future()

    def start(self, take: Take | None = None) -> None:
        """Queue all choices, or none. Raises ApiError.

        take: called with each event as it comes, in the event loop; it must not wait.
        """
        self._take = take or self._take
        with self._noting_errors():
            self._tickets = self.served.engine.submit(
                [(choice.prompt, choice.decoder) for choice in self._all],
                self._arrived,
                self._request.ignore_eos,
                views=self._request.events,
            )

    async def run(self) -> None:
        """Wait until all choices have ended. Raises ApiError for the first one that fails, which
        cancels the others; cancelling this cancels all."""
        try:
            with self._noting_errors():
                await asyncio.wait_for(self._ended, self._limit - self.seconds)
            self.outcome = "finished"
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the choices that have not ended."""
        for ticket in self._tickets:
            ticket.left = True

    def _arrived(self, place: int, item: Event | Exception) -> None:
        choice = self._all[place]
        try:
            if isinstance(item, Exception):
                raise item
            piece = choice.take(item)
            if choice not in self._scores:
                self._held.append((choice, item, piece))
            while self._held and all(score.result for score in self._scores):
                self._take(*self._held.pop(0))
            self._running -= item.result is not None
            if not self._running:
                self._ended.set_result(None)
        except Exception as error:
            self.cancel()
            if not self._ended.done():
                self._ended.set_exception(error)

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Note how it ended, and raise ApiError; the server's own mistakes stay what they are."""
        try:
            yield
        except Exception as error:
            found = as_api_error(error)
            self.error = str(found.detail if found else error)
            self.outcome = "failed"
            if found is not None:
                default = "refused" if found.status_code < 500 else "failed"
                self.outcome = _OUTCOMES.get(found.code or "", default)
            raise found or error from error

    def likelihoods(self, choice: Choice) -> list[TokenLikelihood]:
        """Return the likelihoods of a choice's prompt; its own result where it decodes nothing."""
        known = self._scores[choice.index // self.n] if self._scores else choice
        assert known.result is not None
        return known.result.likelihoods

    @property
    def seconds(self) -> float:
        """Measure the seconds since the request came."""
        return time.perf_counter() - self.began

    @property
    def tokens(self) -> int:
        """Count the tokens of all responses so far."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def calls(self) -> list[tuple[int, int]]:
        """List (rows fed, rows cached) of the forwards of all choices and likelihoods."""
        return [call for choice in self._all for call in choice.calls]


def choose_decoder(served: ServedModel, asked: TextRequest) -> Decoder:
    """Make the decoder that a request asks for, its fields over the operator's options. Raises
    ApiError (400), which names the field."""
    kind = served.default
    if asked.decoder is not None:
        if asked.decoder not in served.decoders:  # looked up, never imported
            raise ApiError(
                400,
                f"decoder: {not_one_of(asked.decoder, served.decoders)} for {served.name}",
                param="decoder",
                code="decoder_not_found",
            )
        kind = served.decoders[asked.decoder]
    own = dict(asked.model_extra or {})
    # max_tokens is what OpenAI calls the length.
    known = [option.name for option in options_of(kind) if option.name != "max_new_tokens"]
    for name in own:
        if name not in known:
            nearest = did_you_mean(name, [*type(asked).model_fields, *known])
            raise ApiError(
                400,
                f"there is no field {name}, and no such option of the decoder {kind.name}{nearest}",
                param=name,
                code="unknown_field",
            )
    shared = {name: getattr(asked, name) for name in common_options()}
    if asked.stop is not None:
        shared["stop"] = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    shared["max_new_tokens"] = asked.max_tokens or None  # 0 is for likelihoods alone
    own |= {name: value for name, value in shared.items() if value is not None}
    if asked.top_k in (0, -1):  # vLLM's words for off
        own["top_k"] = None
    values = {"seed": secrets.randbits(48)} | served.options(kind) | own
    try:
        decoder = kind(**kind.with_model_defaults(values, served.model.contract))
        decoder.check(served.model.contract)
    except InputError as error:  # it begins with the option's name, unless several do not agree
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), param=name if name in values else "decoder") from error
    if not decoder.greedy:
        return decoder
    if asked.n > 1:
        raise ApiError(
            400,
            f"n is {asked.n}, and greedy decoding gives the same answer each time: expected n 1, "
            "or a temperature above 0",
            param="n",
        )
    return replace(decoder, seed=0)


def likelihood_of(served: ServedModel) -> Likelihood:
    """Return the scorer of prompts. Raises ApiError (400) for a bidirectional model."""
    with blaming("echo", "echo with logprobs: "):
        return Likelihood.of(served.model.contract)
