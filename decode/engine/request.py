"""Take a request through the engine: its session, its counts, its result."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from d2f.contract import Contract
from d2f.errors import InputError, NonFiniteLogitsError, RequestError, panics_are_errors
from decode.decoders.base import Decoder
from decode.engine.batch import Sampler
from decode.engine.pieces import Feed
from decode.step import Event, FinishReason, Predictions, Result, Step


class Request:
    """A prompt with its decoder.

    index: says which prompt of the caller's it is.
    views: its events show its blocks, which costs time in each forward.
    step: what its next forward feeds; None before `begin` and after the last one.
    feed: how far the step has been fed, where the engine feeds steps in pieces or copies rows.
    base: where its slots begin in the cache.
    """

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
        self.session = decoder.begin(prompt, contract)
        self.sampler = Sampler(decoder, contract.mask_id)
        self.step: Step | None = None
        self.feed: Feed | None = None
        self.calls: list[tuple[int, int]] = []
        self.reused_rows = 0
        self.base = 0
        self.began: float | None = None
        self.result: Result | None = None

    @property
    def done(self) -> bool:
        return self.result is not None

    def begin(self, share: float) -> Step:
        """Make the first step, with a share of the engine's rows. Raises what the session
        raises."""
        if self.step is None:
            self.session.share = share
            self.step = self.session.step()
        if self.step is None:  # it would run for ever, in no forward
            raise RequestError(f"the decoder {self.decoder.name} has no first step")
        return self.step

    def fail(self, error: Exception, now: float) -> Event:
        """End with an error that was raised on its behalf; returns the last event."""
        if not isinstance(error, InputError | RequestError):
            cause = error
            error = RequestError(
                f"failed at forward {len(self.calls)}: {type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        self.step = self.feed = None
        self.result = Result.failed(
            error,
            calls=self.calls,
            seconds=0.0 if self.began is None else now - self.began,
            prompt_tokens=self.session.prompt_length,
            seed=self.decoder.seed,
        )
        return Event(self.index, len(self.calls), [], result=self.result)

    def accept(self, fed: Step, predictions: Predictions | None, now: float) -> None:
        """Take the predictions of its step or of a piece of it, None if they are not finite; it may
        be done afterwards. Raises NonFiniteLogitsError, and what the session raises."""
        self.calls.append((len(fed.tokens), fed.cached))  # also if it failed: the forward was run
        if predictions is None:
            raise NonFiniteLogitsError(
                f"the model gave NaN or infinite logits at forward {len(self.calls)}"
            )
        whole: Predictions | None = predictions
        if self.feed is not None:
            whole = self.feed.take(predictions)
        self.sampler.took(len(fed.read), whole=whole is not None)
        if whole is None:  # rows of its step are still to be fed
            return
        if self.feed is not None:
            self.reused_rows += self.feed.spared
            self.feed = None
        self.session.accept(whole)
        # Ask for the next step at once: a request that is done leaves before the next forward.
        # A stop string counts only in text that can no longer change.
        stopped = self.decoder.stop and self._stop(self.session.settled) is not None
        self.step = None if stopped else self.session.step()
        if self.step is None:
            self.result = self._finish(now)

    def event(self) -> Event:
        """Say what the last forward did to this request."""
        return Event(
            self.index,
            len(self.calls),
            self.session.blocks() if self.views else [],
            list(self.session.revealed) if self.feed is None else [],  # None: its step is whole
            self.result,
            self.session.settled,
            self.calls[-1],
        )

    def _finish(self, now: float) -> Result:
        # Behind what is settled there may be decided tokens with masks in between.
        tokens = self.session.settled
        reason: FinishReason = "length"
        # First the end id: a stop string behind it is not in the response.
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
            seconds=now - (self.began or 0.0),
            finish_reason=reason,
            prompt_tokens=self.session.prompt_length,
            counts=dict(self.session.counts),
            seed=self.decoder.seed,
            reused_rows=self.reused_rows,
            likelihoods=self.session.likelihoods,
        )

    def _decode(self, tokens: list[int]) -> str:
        assert self.tokenizer is not None  # `prompts.checked` refuses stop strings without one
        with panics_are_errors():
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _stop(self, tokens: list[int]) -> tuple[list[int], str] | None:
        """Cut tokens at the first stop string: the tokens whose text lies wholly before it, and the
        text before it. None where no stop string is in the text.

        First is the one that ends first, of several the longest, so that tokens behind it, which a
        wide forward settles too, change nothing.
        """
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
