"""Log-likelihoods of targets behind prompts, by the way that fits the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.api import stream
from decode.decoders.visibility import mask_kind
from decode.engine.likelihood import Likelihood
from decode.engine.result import Result
from decode.harness.asked_decoder import request_seed
from decode.harness.monte_carlo import MonteCarlo, Score

WAYS = ("mc", "left_to_right")
Pair = tuple[list[int], list[int]]  # ids of a prompt, one or more, and of its target
NOTHING = Score(0.0, 0.0, True, 0)  # of a target without tokens


@dataclass(frozen=True)
class Scoring:
    """way: ``mc``, LLaDA's Monte Carlo estimate, for a model that reads both sides, or
    ``left_to_right``, exact, for a causal model or one that goes block after block."""

    way: str
    monte_carlo: MonteCarlo
    seed: int

    @staticmethod
    def of(model: DiffusionModel, way: str | None, monte_carlo: MonteCarlo, seed: int) -> Scoring:
        """way: None takes the one that fits. Raises InputError for one that does not."""
        fitting = "mc" if mask_kind(model.contract) == "bidirectional" else "left_to_right"
        if way not in (None, *WAYS):
            raise InputError(f"nll must be {' or '.join(WAYS)}, got {way!r}")
        if way not in (None, fitting):
            raise InputError(
                f"nll={way} does not fit {model.path or 'the model'}, which is "
                f"{mask_kind(model.contract)}: expected {fitting}"
            )
        if fitting != "mc" and monte_carlo.guidance:
            raise InputError(f"cfg needs nll=mc, and this model takes {fitting}")
        return Scoring(fitting, monte_carlo, seed)

    def room(self, model: DiffusionModel) -> int:
        """Most tokens of a prompt and its target together."""
        if self.way == "mc":
            return model.context_length
        return model.context_length - Likelihood.of(model.contract).overhang

    def scores(
        self, model: DiffusionModel, pairs: Sequence[Pair], batch_size: int
    ) -> Iterator[tuple[int, Score]]:
        """(a pair's number, its score) as soon as it is known, the longest first."""
        yield from ((i, NOTHING) for i, (_, target) in enumerate(pairs) if not target)
        order = [i for i, (_, target) in enumerate(pairs) if target]
        order.sort(key=lambda i: -sum(map(len, pairs[i])))
        if self.way == "mc":
            for i in order:
                seed = request_seed(self.seed, *pairs[i])
                yield i, self.monte_carlo.score(model, *pairs[i], seed)
        elif order:
            kinds = [Likelihood.of(model.contract, given=len(pairs[i][0])) for i in order]
            texts = [[*prompt, *target] for prompt, target in (pairs[i] for i in order)]
            for event in stream(model, texts, kinds, batch_size=batch_size):
                if event.result is not None:
                    yield order[event.request], _exact(event.result)


def _exact(result: Result) -> Score:
    each = result.likelihoods
    greedy = all(one.greedy for one in each)
    return Score(sum(one.logprob for one in each), 0.0, greedy, result.forwards)
