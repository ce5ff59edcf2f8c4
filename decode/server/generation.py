"""What one request decodes: its choices, run together, each a request of the engine."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from d2f.errors import EngineClosedError, InputError, repr_of
from decode.decoders import Decoder
from decode.decoders.base import common_options, options_of
from decode.engine.async_engine import EventStream
from decode.engine.likelihood import Likelihood
from decode.engine.prompts import Prompt, check, encode
from decode.server.models import Kind, ServedModel
from decode.server.protocol import ApiError, Asked, as_api_error
from decode.server.text import ResponseLogprobs, SettledText, TokenLogprob
from decode.step import Event, Result, TokenLikelihood

# The prompts of a request as ids with a decoder each, checked before any of them starts.

Job = tuple[list[int], Decoder]


def make_jobs(
    served: ServedModel, prompts: Sequence[Prompt], decoder: Decoder, field: str, *, fixed: bool
) -> list[Job]:
    """Each prompt's ids and its decoder. field: the one that the prompts came in. fixed: the
    length of the response is the request's own; else it is less where the context leaves less.

    Raises ApiError (400) for the first that cannot be decoded.
    """
    jobs = []
    for place, prompt in enumerate(prompts):
        where = field if len(prompts) == 1 else f"{field} {place}"
        try:
            ids = encode(served.model, prompt, where, raw=True)
            job = ids, _fitted(served, ids, decoder, where, fixed)
            check(served.model, *job, where)
        except InputError as error:
            raise ApiError(400, str(error), param=field) from error
        jobs.append(job)
    return jobs


def _fitted(
    served: ServedModel, ids: list[int], decoder: Decoder, where: str, fixed: bool
) -> Decoder:
    """The decoder with a length that fits behind the prompt. Raises ApiError."""
    room = served.context_length - len(ids) - decoder.extra_positions
    length = decoder.length
    if not fixed:
        length = min(length, max(room, 1))
    if length > room:
        after = (
            f", and {decoder.extra_positions} positions after them"
            if decoder.extra_positions
            else ""
        )
        raise ApiError(
            400,
            f"{where} has {len(ids)} tokens and the response {length}{after}: the context of "
            f"{served.name} is {served.context_length}",
            param=where.partition(" ")[0],
            code="context_length_exceeded",
        )
    length_option: Any = {"max_new_tokens": length}  # a field of every decoder, not of their base
    return replace(decoder, **length_option)


Outcome = Literal["finished", "cancelled", "failed", "refused", "timeout"]


@dataclass(eq=False)
class Choice:
    """One answer: of prompt ``index // n``, its ids, by its decoder."""

    index: int
    prompt: list[int]
    decoder: Decoder
    text: SettledText
    logprobs: ResponseLogprobs | None  # None where they were not asked for
    calls: list[tuple[int, int]] = field(default_factory=list)
    settled: int = 0  # tokens that are final, up to an end
    grew: list[float] = field(default_factory=list)  # when they became more
    result: Result | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the response so far."""
        return self.settled if self.result is None else len(self.result.tokens)

    def take(self, event: Event, end_ids: Sequence[int]) -> None:
        """Count an event."""
        self.calls.append(event.call)
        if event.error is not None:  # its result is none of an answer: what came before stays
            return
        self.result = event.result
        if self.logprobs is not None:
            self.logprobs.take(event)
        settled = len(event.settled)
        for place in range(self.settled, settled):
            if event.settled[place] in end_ids:
                settled = place
                break
        if settled > self.settled:
            self.settled = settled
            self.grew.append(time.perf_counter())

    def piece(self, event: Event) -> str:
        """The text that may be sent after an event, and was not."""
        result = event.result
        return self.text.add(event.settled) if result is None else self.text.finish(result)

    def new_logprobs(self) -> list[TokenLogprob]:
        """Those of the text that was sent, or of all of it at the end, which were not given yet."""
        assert self.logprobs is not None
        if self.result is None:
            return self.logprobs.within(self.text.sent)
        return self.logprobs.finish(self.result)

    def end_logprob(self) -> TokenLogprob:
        """That of the end id that ended the answer."""
        assert self.logprobs is not None and self.logprobs.end is not None
        return self.logprobs.end


Take = Callable[[Choice, Event], None]


class Generation:
    """The choices of a request from their entry into the engine to their end.

    id: of the request. decoder: that of the request, jobs: its prompts, each with that decoder at
    its length. n: choices a prompt, each with a seed of its own. views: whether its events say how
    the blocks stand. scored: the prompts whose likelihoods are wanted besides; they are known
    before the first event. began: when the request came, by `time.perf_counter`. seconds: from then
    until it must be done.
    """

    def __init__(
        self,
        id: str,
        served: ServedModel,
        decoder: Decoder,
        jobs: Sequence[Job],
        n: int,
        *,
        ignore_eos: bool,
        logprobs: bool,
        views: bool,
        scored: Sequence[Job] = (),
        began: float,
        seconds: float,
    ):
        self.id = id
        self.served = served
        self.decoder = decoder
        self.prompt_tokens = sum(len(ids) for ids, _ in jobs)
        self.n = n
        self._views = views
        self.ignore_eos = ignore_eos
        self.end_ids = () if ignore_eos else served.model.end_ids
        self.began = began
        self.created = int(time.time())
        left = seconds - self.seconds
        self._deadline = asyncio.get_running_loop().time() + left
        self.outcome: Outcome = "cancelled"  # until it is known to have ended otherwise
        self.error: str | None = None
        self._streams: list[EventStream] = []
        self.choices = []
        for p, (ids, fitted) in enumerate(jobs):
            for k in range(n):
                own, tokenizer = fitted.sampled(p, k), served.model.tokenizer
                text = SettledText(tokenizer, decoder.stop, self.end_ids)
                noted = ResponseLogprobs(tokenizer, self.end_ids) if logprobs else None
                self.choices.append(Choice(p * n + k, ids, own, text, noted))

        self._scores = [
            Choice(p, ids, kind, SettledText(None, (), ()), None)
            for p, (ids, kind) in enumerate(scored)
        ]
        self._take: Take | None = None
        self._over: asyncio.Future[Exception | None] | None = None  # what ended `run`
        self._left = len(self._all)  # choices that have not ended
        self._held: list[tuple[Choice, Event]] = []  # until the likelihoods are known

    async def start(self) -> None:
        """Queue all choices, or none. Raises ApiError."""
        asked = [(choice.prompt, choice.decoder) for choice in self._all]
        try:
            self._streams = await self.served.engine.submit_all(
                asked, ignore_eos=self.ignore_eos, views=self._views
            )
        except Exception as error:
            raise self._failed(error, "refused") from error

    async def run(self, take: Take | None = None) -> None:
        """Decode all choices to their end. take: called with each event of theirs as it comes, in
        the event loop, by no task: it must not wait. Raises ApiError for the first choice that
        fails, which cancels the others, and what `take` raises. Who cancels this cancels all."""
        loop = asyncio.get_running_loop()
        self._take, self._over = take, loop.create_future()
        timer = loop.call_at(self._deadline, self._end, TimeoutError())
        try:
            for choice, stream in zip(self._all, self._streams, strict=True):
                stream.hand_to(partial(self._arrived, choice))
            error = await self._over
        finally:
            timer.cancel()
            for stream in self._streams:  # what has not ended is cancelled
                await stream.aclose()
        if error is not None:
            raise error

    def leave(self) -> None:
        """The client is gone: have `run` raise ApiError (499, which nobody reads but the log)."""
        if self._over is not None and not self._over.done():
            self._over.set_result(ApiError(499, "the client left"))

    def _arrived(self, choice: Choice, item: Event | Exception) -> None:
        assert self._over is not None
        if self._over.done():  # it was cancelled, or has failed
            return
        error = item if isinstance(item, Exception) else item.error
        try:
            if not isinstance(item, Exception):
                self._note(choice, item)
        except Exception as mistake:  # this server's own: none that a client is told of
            self._over.set_result(mistake)
            return
        if error is not None:
            self._end(error)
        elif self.outcome == "finished":
            self._over.set_result(None)

    def _note(self, choice: Choice, event: Event) -> None:
        """Count an event, and hand on those of choices as soon as all likelihoods are known."""
        if event.error is not None or choice in self._scores:
            choice.take(event, self.end_ids)
        else:
            self._held.append((choice, event))
        if event.error is not None:
            return
        if event.result is not None:
            self._left -= 1
            if not self._left:
                self.outcome = "finished"
        if all(score.result for score in self._scores):
            held, self._held = self._held, []
            for one, its in held:
                one.take(its, self.end_ids)
                if self._take is not None:
                    self._take(one, its)

    def _end(self, error: Exception) -> None:
        """Have `run` raise what a client is told of an error."""
        assert self._over is not None
        if self._over.done():
            return
        outcome: Outcome = "failed"
        if isinstance(error, TimeoutError):
            outcome = "timeout"
        elif isinstance(error, EngineClosedError):
            outcome = "cancelled"
        self._over.set_result(self._failed(error, outcome))

    def _failed(self, error: Exception, outcome: Outcome) -> ApiError:
        """Note how it ended; what its client is told."""
        found = as_api_error(error)
        self.outcome, self.error = outcome, found.message
        found.__cause__ = error
        return found

    def likelihoods(self, choice: Choice) -> list[TokenLikelihood]:
        """Those of the prompt of a choice: of the choice itself, where it has nothing else."""
        known = self._scores[choice.index // self.n] if self._scores else choice
        assert known.result is not None
        return known.result.likelihoods

    @property
    def _all(self) -> list[Choice]:
        return [*self.choices, *self._scores]

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.perf_counter() - self.began

    @property
    def tokens(self) -> int:
        """Of all responses so far."""
        return sum(choice.tokens for choice in self.choices)

    @property
    def calls(self) -> list[tuple[int, int]]:
        """(rows fed, rows cached) of the forwards of all choices, and of likelihoods."""
        return [call for choice in self._all for call in choice.calls]


# The decoder of a request: its own fields over the operator's options.


def choose_decoder(served: ServedModel, asked: Asked, most: int | None) -> Decoder:
    """The decoder that a request asks for, its seed that of the whole request. most: tokens of a
    response, where the request says it. Raises ApiError (400), which names the field."""
    kind = _kind(served, asked)
    values = _own_options(kind, asked)
    for name in common_options():
        value = getattr(asked, name)
        if name == "top_k" and value in (0, -1):  # vLLM's words for off
            values[name] = None
        elif value is not None:
            values[name] = value
    if asked.stops is not None:
        values["stop"] = asked.stops
    if most is not None:
        values["max_new_tokens"] = most
    for option in options_of(kind):
        if option.name in values:
            try:
                option.verify(values[option.name])
            except InputError as error:
                raise ApiError(400, str(error), param=option.name) from error
    values = served.options(kind) | values
    values.setdefault("seed", secrets.randbits(48))
    try:
        decoder = kind(**kind.with_model_defaults(values, served.model.contract))
        decoder.check(served.model.contract)
    except InputError as error:  # options that do not go together
        raise ApiError(400, str(error), param="decoder") from error
    if decoder.sampling.greedy:
        decoder = replace(decoder, seed=0)
        if asked.n > 1:
            raise ApiError(
                400,
                f"n is {asked.n}, and greedy decoding gives the same answer each time: expected "
                "n 1, or a temperature above 0",
                param="n",
            )
    return decoder


def likelihood_of(served: ServedModel) -> Likelihood:
    """What reads the likelihoods of prompts. Raises ApiError (400) for a bidirectional model."""
    try:
        return Likelihood.of(served.model.contract)
    except InputError as error:
        raise ApiError(400, f"echo with logprobs: {error}", param="echo") from error


def _kind(served: ServedModel, asked: Asked) -> Kind:
    if asked.decoder is None:
        return served.default
    # Looked up and never imported: what a client names is no code to be run.
    kind = served.decoders.get(asked.decoder)
    if kind is None:
        raise ApiError(
            400,
            f"decoder must be one of {', '.join(served.decoders)} for the model {served.name}, got "
            f"{repr_of(asked.decoder)}",
            param="decoder",
            code="decoder_not_found",
        )
    return kind


def _own_options(kind: Kind, asked: Asked) -> dict[str, Any]:
    """The fields that are options of the decoder."""
    given = asked.model_extra or {}
    # max_tokens is what OpenAI calls the length.
    known = [option.name for option in options_of(kind) if option.name != "max_new_tokens"]
    for name in given:
        if name not in known:
            raise ApiError(
                400,
                f"there is no field {name}, and no such option of the decoder {kind.name}, which "
                f"has {', '.join(known)}",
                param=name,
                code="unknown_field",
            )
    return dict(given)
