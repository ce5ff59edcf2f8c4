"""What decoding yields: events while it runs, a result when a request is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["end", "stop", "length", "error"]
# waiting: not opened yet. semi-active, fully active, to cache, cached: D2F's, where a block that
# other decoders work on is fully active. decoded: without masks, and nothing is said of a cache.
BlockState = Literal["waiting", "semi-active", "fully active", "to cache", "cached", "decoded"]


@dataclass(frozen=True)
class BlockView:
    """One block as it stands: response positions ``[start, end)`` and its tokens, None where
    still masked."""

    start: int
    end: int
    state: BlockState
    tokens: tuple[int | None, ...]


@dataclass(frozen=True)
class Revealed:
    """A token that a step decided: response position, id, confidence."""

    position: int
    token: int
    confidence: float


@dataclass(frozen=True)
class TokenLikelihood:
    """A token of a prompt, given all before it (`decode.engine.likelihood`). logprob: natural
    logarithm of its probability under the full softmax. top: the likeliest token in its place, the
    mask id left out, and its top_logprob."""

    position: int
    token: int
    logprob: float
    top: int
    top_logprob: float

    @property
    def greedy(self) -> bool:
        """Whether greedy decoding would choose it."""
        return self.token == self.top


@dataclass(frozen=True)
class Result:
    """One decoded request.

    tokens: response ids, cut before the first end id or stop string. raw_tokens: everything
    generated, uncut (a position that early exit left undecoded is not in it). text: tokens
    decoded, None without a tokenizer. forwards: calls of the model that this request was in.
    calls: (rows fed, rows already cached) of each; where a step was fed in pieces, each piece is
    one. seconds: wall time from admission to the end.
    finish_reason: ``end`` (an end id), ``stop`` (a stop string), ``length`` or ``error``. counts:
    what the decoder counted, by name. seed: what its tokens were drawn with. error: why the request
    failed, which leaves it without tokens; None where it did not. reused_rows: rows of its prompt
    whose keys and values were copied from another request instead of fed (`Engine`). likelihoods:
    of the prompt's tokens, where they were asked for.
    """

    tokens: list[int]
    raw_tokens: list[int]
    text: str | None
    forwards: int
    calls: list[tuple[int, int]]
    seconds: float
    finish_reason: FinishReason
    prompt_tokens: int
    counts: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    error: Exception | None = None
    reused_rows: int = 0
    likelihoods: list[TokenLikelihood] = field(default_factory=list)

    @property
    def tokens_per_forward(self) -> float:
        """Visible tokens a call of the model, 0 where none was made."""
        return len(self.tokens) / self.forwards if self.forwards else 0.0

    @property
    def p_cache(self) -> float | None:
        """WeDLM's figure (`p_cache_of`); None for other decoders."""
        return p_cache_of(len(self.tokens), self.counts)

    @staticmethod
    def failed(
        error: Exception,
        *,
        calls: list[tuple[int, int]] | None = None,
        seconds: float = 0.0,
        prompt_tokens: int = 0,
        seed: int = 0,
    ) -> Result:
        """The result of a request that failed, before or after it entered the engine."""
        calls = calls or []
        return Result(
            tokens=[],
            raw_tokens=[],
            text=None,
            forwards=len(calls),
            calls=calls,
            seconds=seconds,
            finish_reason="error",
            prompt_tokens=prompt_tokens,
            seed=seed,
            error=error,
        )


def p_cache_of(tokens: float, counts: Mapping[str, float]) -> float | None:
    """WeDLM's p_cache (arXiv 2512.22737), N_gen / N_fwd: new tokens, here the visible ones, over
    the rows fed after the prompt's, in all forwards (the decoder's count ``window_rows``). 1 where
    each token is fed once and nothing else; None where nothing counted such rows."""
    rows = counts.get("window_rows")
    return tokens / rows if rows else None


@dataclass(frozen=True)
class Event:
    """One request after one forward. result is set on its last event.

    request: index of the result (of the prompt, where each is sampled once). forward: number of the
    request's forward, from 1; 0 where it failed before one. blocks: none where nobody asked for
    them. revealed: nothing where the forward fed a piece of a step that is not the last. settled:
    response ids before the first that may still change: each event's begin with those of the one
    before, whatever the decoder takes back behind them. call: (rows fed, rows already cached) of
    this forward, as in `Result.calls`.
    """

    request: int
    forward: int
    blocks: list[BlockView]
    revealed: list[Revealed] = field(default_factory=list)
    result: Result | None = None
    settled: list[int] = field(default_factory=list)
    call: tuple[int, int] = (0, 0)

    @property
    def error(self) -> Exception | None:
        """Why the request failed, None while it runs and where it did not."""
        return None if self.result is None else self.result.error
