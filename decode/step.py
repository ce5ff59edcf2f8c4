"""The protocol between decoders and the engine: a `Step` says what to compute, `Predictions` answer
it, events and a `Result` tell the caller. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from d2f.spans import Ints

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """Rows of one request to feed, as integer arrays; slots, spans and read count from its own 0.

    tokens, positions, slots: ``[T]``, what is fed, where it stands, which slot it overwrites.
    spans: ``[T, K, 2]``, the slots that each row sees.
    read: ``[N]``, the rows whose predictions are wanted; a row may be read more than once.
    cached: how many leading slots were final before this step.
    queried_tokens: ``[N]``, a token for each row that is read, whose probability is wanted beside
        that of the chosen one.
    uncertainty: entropy and margin are wanted, too.
    draws: ``[N]``, the number of the draw of each row that is read, where it shall not follow from
        the number of the step.

    D2F with a cached prompt ``7 8`` and two open blocks of 2, of which position 2 is decided (9)
    and the others hold the mask id m::

        position     0 1 | 2       3       | 4       5
        x            7 8 | 9       m       | m       m

        tokens             9       m         m       m
        positions          2       3         4       5
        slots              2       3         4       5
        spans              [0, 4)  [0, 4)    [0, 6)  [0, 6)
        read                       1         2       3      (Dream's rows: 0, 1, 2)
        cached       2
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    spans: Ints
    read: Ints
    cached: int
    queried_tokens: Ints | None = None
    uncertainty: bool = False
    draws: Ints | None = None


@dataclass(frozen=True)
class Predictions:
    """The answer to a step: of each row that was read, computed in fp32 from its logits.

    token: int64 ``[N]``, the chosen one, never the mask id.
    confidence: probability of that token.
    queried_probability: probability of the token that the step queried.
    queried_log_probability: its natural logarithm, also where the probability rounds to 0.
    entropy: in nats.
    margin: difference of the two largest probabilities, the mask id's left out.

    All but token are fp32 ``[N]``, under the full softmax, and None where the step did not ask.
    """

    token: Ints
    confidence: Floats
    queried_probability: Floats | None = None
    queried_log_probability: Floats | None = None
    entropy: Floats | None = None
    margin: Floats | None = None

    def rows(self, part: slice) -> Predictions:
        """Take those of some of the rows."""
        found = {name: column[part] for name, column in vars(self).items() if column is not None}
        return Predictions(**found)

    @staticmethod
    def joined(parts: Sequence[Predictions]) -> Predictions:
        """Join those of parts of the rows."""
        names = [name for name, column in vars(parts[0]).items() if column is not None]
        return Predictions(**{n: np.concatenate([vars(part)[n] for part in parts]) for n in names})


FinishReason = Literal["end", "stop", "length", "error"]
# waiting: not opened yet. semi-active, fully active, to cache, cached: D2F's, where a block that
# other decoders work on is fully active. decoded: without masks, and nothing is said of a cache.
BlockState = Literal["waiting", "semi-active", "fully active", "to cache", "cached", "decoded"]


@dataclass(frozen=True)
class BlockView:
    """A block as it stands: response positions ``[start, end)`` and tokens, None where masked."""

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
    """A token of a prompt, given all before it (`decode.engine.likelihood`).

    logprob: natural logarithm of its probability under the full softmax. top: the likeliest token
    in its place, the mask id left out, with its top_logprob.
    """

    position: int
    token: int
    logprob: float
    top: int
    top_logprob: float

    @property
    def greedy(self) -> bool:
        """Say whether greedy decoding would choose it."""
        return self.token == self.top


@dataclass(frozen=True)
class Result:
    """Hold a decoded request.

    tokens: response ids, cut before the first end id or stop string.
    raw_tokens: everything generated, uncut; positions that early exit left undecoded are not in it.
    text: tokens decoded, None without a tokenizer.
    forwards: calls of the model that this request was in.
    calls: (rows fed, rows already cached) of each; a step that was fed in pieces has several.
    seconds: wall time from admission to the end.
    finish_reason: ``end`` (an end id), ``stop`` (a stop string), ``length`` or ``error``.
    counts: what the decoder counted, by name.
    seed: what its tokens were drawn with.
    error: why the request failed, which leaves it without tokens; None where it did not.
    reused_rows: rows of its prompt that were copied from another request instead of fed.
    likelihoods: of the prompt's tokens, where they were asked for.
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
        """Make the result of a request that failed, before or after it entered the engine."""
        calls = calls or []
        return Result(
            [], [], None, len(calls), calls, seconds, "error", prompt_tokens, seed=seed, error=error
        )


def p_cache_of(tokens: float, counts: Mapping[str, float]) -> float | None:
    """Compute WeDLM's p_cache (arXiv 2512.22737), N_gen / N_fwd: new tokens, here the visible ones,
    over the rows fed after the prompt's, in all forwards (the decoder's count ``window_rows``). 1
    where each token is fed once and nothing else; None where nothing counted such rows."""
    rows = counts.get("window_rows")
    return tokens / rows if rows else None


@dataclass(frozen=True)
class Event:
    """Show a request after a forward.

    request: index of the result (of the prompt, where each is sampled once).
    forward: number of the request's forward, from 1; 0 where it failed before one.
    blocks: empty where nobody asked for them.
    revealed: empty where the forward fed a piece of a step that is not the last.
    result: set on the last event.
    settled: response ids before the first that may still change. Each event's begin with those of
        the one before, whatever the decoder takes back behind them.
    call: (rows fed, rows already cached) of this forward, as in `Result.calls`.
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
        """The error that ended the request, None while it runs and where it did not fail."""
        return None if self.result is None else self.result.error


def sample_seed(seed: int, prompt: int, sample: int) -> int:
    """Make the seed of one sample of one of several prompts: different for each, so that equal
    prompts give different answers; of the first sample of the first prompt the given one."""
    if prompt == sample == 0:
        return seed
    drawn = np.random.SeedSequence(seed % 2**64, spawn_key=(prompt, sample))
    return int(drawn.generate_state(1, np.uint64)[0])
