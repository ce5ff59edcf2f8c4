"""One request on its way through the engine: its session, its counts, its result."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from d2f.contract import Contract
from d2f.errors import InputError, NonFiniteLogitsError, RequestError
from decode.decoders.adaptive import Adaptive
from decode.decoders.base import Decoder
from decode.engine.pieces import Feed
from decode.engine.sampling import Sampler
from decode.step import Event, FinishReason, Predictions, Result, Step


class Request:
    """A prompt with its decoder; index says which prompt of the caller's it is. views: whether its
    events have blocks, which nobody who only waits for the result need pay for. adaptive: its
    session, where the engine chooses how wide it speculates, else None."""

    def __init__(
        self,
        index: int,
        prompt: list[int],
        decoder: Decoder,
        contract: Contract,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        views: bool = True,
    ):
        self.index = index
        self.views = views
        self.decoder = decoder
        self.contract = contract
        self.tokenizer = tokenizer
        self.session = session = decoder.begin(prompt, contract)
        self.adaptive = session if isinstance(session, Adaptive) and session.widths else None
        self.sampler = Sampler(decoder.sampling, contract.mask_id)
        # Always one step ahead: that a request is done is known with the predictions that end it,
        # and it leaves the batch before the next forward.
        self.feed = self._next_feed(first=True)
        if self.feed is None:  # it would run for ever, in no forward
            raise RequestError(f"the decoder {decoder.name} has no first step")
        self.calls: list[tuple[int, int]] = []
        self.reused_rows = 0
        self.base = 0
        self.result: Result | None = None
        self._began = 0.0

    @property
    def next_step(self) -> Step | None:
        """What its session asks for next."""
        return None if self.feed is None else self.feed.step

    @property
    def done(self) -> bool:
        return self.result is not None

    def start(self, base: int, now: float) -> None:
        """Enter the batch: slots begin at `base`."""
        self.base, self._began = base, now

    def fail(self, error: Exception, now: float) -> Event:
        """Give up for what was raised on its behalf; its last event."""
        if not isinstance(error, InputError | RequestError):
            cause = error
            error = RequestError(
                f"failed at forward {len(self.calls)}: {type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        self.feed = None
        self.result = Result.failed(
            error,
            calls=self.calls,
            seconds=now - self._began if self._began else 0.0,  # 0: it never entered
            prompt_tokens=self.session.prompt_length,
            seed=self.decoder.seed,
        )
        return Event(self.index, len(self.calls), [], result=self.result)

    def accept(self, step: Step, predictions: Predictions | None, now: float) -> None:
        """Take the predictions of a step or of a piece of it, None where they are not finite; the
        request may be done after it. Raises NonFiniteLogitsError, and what the session raises."""
        self.calls.append((len(step.tokens), step.cached))  # also of a step that failed: it was run
        if predictions is None:
            raise NonFiniteLogitsError(
                f"the model gave NaN or infinite logits at forward {len(self.calls)}"
            )
        assert self.feed is not None
        if self.feed.first:
            self.reused_rows = self.feed.spared
        whole = self.feed.take(predictions)
        self.sampler.took(len(step.read), whole=whole is not None)
        if whole is None:  # rows of its step are still to be fed
            return
        self.session.accept(whole)
        # A stop string in text that may still change ends nothing.
        stopped = self.decoder.stop and self._stop(self.session.settled) is not None
        self.feed = None if stopped else self._next_feed()
        if self.feed is None:
            self.result = self._finish(now)

    def _next_feed(self, *, first: bool = False) -> Feed | None:
        if (session := self.adaptive) is not None:
            return Feed(session.feed_step, first=first) if session.proceed() else None
        step = self.session.step()
        return None if step is None else Feed(step, first=first)

    def event(self) -> Event:
        """What the last forward did to this request."""
        in_pieces = self.feed is not None and self.feed.fed
        revealed = [] if in_pieces else list(self.session.revealed)
        return Event(
            self.index,
            len(self.calls),
            self.session.blocks() if self.views else [],
            revealed,
            self.result,
            self.session.settled,
            self.calls[-1],
        )

    def _finish(self, now: float) -> Result:
        # Only what is settled: behind it there may be decided tokens with masks in between.
        tokens = self.session.settled
        reason: FinishReason = "length"
        # The end id is looked for first, so a stop string behind it is of no response.
        ends = [i for i, token in enumerate(tokens) if token in self.contract.end_ids]
        if ends:
            tokens, reason = tokens[: ends[0]], "end"
        text = None if self.tokenizer is None else self._decode(tokens)
        stop = self._stop(tokens)
        if stop is not None:
            tokens, text = stop
            reason = "stop"
        return Result(
            tokens=tokens,
            raw_tokens=self.session.tokens,
            text=text,
            forwards=len(self.calls),
            calls=self.calls,
            seconds=now - self._began,
            finish_reason=reason,
            prompt_tokens=self.session.prompt_length,
            counts=dict(self.session.counts),
            seed=self.decoder.seed,
            reused_rows=self.reused_rows,
            likelihoods=self.session.likelihoods,
        )

    def _decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None  # `prompts.checked` refuses stop strings without one
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _stop(self, tokens: list[int]) -> tuple[list[int], str] | None:
        """Cut tokens at the first stop string: the tokens whose text lies wholly before it, and the
        text before it. None where no stop string is in the text. First is the one that ends first,
        of those the longest: what follows it, which a wide forward settles too, changes nothing."""
        if not self.decoder.stop:
            return None
        text = self._decode(tokens)
        found = [(at + len(s), at) for s in self.decoder.stop if (at := text.find(s)) >= 0]
        if not found:
            return None
        _, cut = min(found)
        # Tokens are dropped until their text ends at the cut; one that spans it goes as a whole.
        kept = tokens
        while kept and len(self._decode(kept)) > cut:
            kept = kept[:-1]
        return kept, text[:cut]
