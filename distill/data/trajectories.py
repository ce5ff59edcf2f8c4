"""Read rollouts, and the states on their way, which WINO+ trains on.

A rollout is a verified response with the step (forward, from 0) that decided each token for good:
``t_l = min{t : y_l is the final token after every forward j >= t}``. Its states are what the
decoder saw before each forward that decided something for good: the tokens with ``t_l < t``
revealed, the others masked. Four tokens a b c d with steps 0 2 1 1 have three states (M: masked):

    before step 0    M M M M    a is decided now, the others later
    before step 1    a M M M    c and d now, b later
    before step 2    a M c d    b now

`distill.rollouts` writes the file that is read here: the settings of its run, then a line a
rollout, in the order of the problems.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator
from transformers import PreTrainedTokenizerBase

from d2f import noise
from d2f.config import Section
from d2f.errors import InputError
from distill.config import Data
from distill.data.samples import Sample
from distill.data.stream import Stream

Count = Annotated[int, Field(ge=0)]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
HEADER = "rollouts"  # the key of the first line


class Rollout(Section):
    """A verified response and how it was decoded.

    unique_id, source: the problem and its task. generated_ids: every decided token, not cut at the
    first end token. trajectory_accepted: t_l of each. trajectory_proposed: the first step that
    decided its final token, which is earlier where that was taken back in between. append_steps:
    the first step that a block was there in, one a block of `block_size` (all 0 where the response
    is there from the start). decoding_steps: forwards. used_temperature: the first of the ladder
    that gave a right answer. text: the answer that was checked.
    """

    unique_id: str
    source: str
    prompt_ids: Annotated[tuple[Count, ...], Field(min_length=1)]
    generated_ids: Annotated[tuple[Count, ...], Field(min_length=1)]
    trajectory_accepted: tuple[Count, ...]
    trajectory_proposed: tuple[Count, ...]
    append_steps: tuple[Count, ...]
    block_size: Annotated[int, Field(gt=0)]
    decoding_steps: Annotated[int, Field(gt=0)]
    used_temperature: Annotated[float, Field(ge=0)]
    text: str

    @model_validator(mode="after")
    def _consistent(self) -> Rollout:
        length, accepted = len(self.generated_ids), np.array(self.trajectory_accepted)
        appended = np.array(self.append_steps)
        if {len(accepted), len(self.trajectory_proposed)} != {length}:
            raise ValueError(f"expected a step for each of the {length} generated ids")
        if len(appended) != -(-length // self.block_size):
            raise ValueError(f"append_steps: expected one for each block, got {len(appended)}")
        there = np.repeat(appended, self.block_size)[:length]
        if (there > accepted).any() or accepted.max() >= self.decoding_steps:
            raise ValueError(
                "trajectory_accepted: expected steps in which the token's block is there, "
                f"below decoding_steps {self.decoding_steps}"
            )
        return self


def read_rollouts(path: str | Path) -> tuple[dict[str, Any], list[Rollout]]:
    """Return the settings of the run that collected a file, and its rollouts.

    Raises InputError, naming file and line, for anything that is not a line of such a file.
    """
    try:
        first, *lines = Path(path).read_bytes().splitlines()
        run = dict(json.loads(first)[HEADER])
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not a file of distill.rollouts: line 1 says no run") from error
    found = []
    for number, line in enumerate(lines, 2):
        try:
            found.append(Rollout.model_validate_json(line))
        except ValidationError as error:
            wrong = error.errors()[0]
            key = ".".join(map(str, wrong["loc"])) or "rollout"
            raise InputError(f"{path}, line {number}: {key}: {wrong['msg']}") from error
    if not found:
        raise InputError(f"{path}: expected at least one rollout, got none")
    return run, found


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the identity of a tokenizer's vocabulary."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def random_steps(steps: Ints, block_size: int, rng: np.random.Generator) -> Ints:
    """Give each block's steps to random positions of it, every step to at least one (the paper's
    ablation): the block has as many states, decided in no sensible order. A block's steps 0 0 2 1
    may become 2 0 1 1."""
    mixed = np.empty_like(steps)
    for start in range(0, len(steps), block_size):
        values = np.unique(steps[start : start + block_size])
        length = len(steps[start : start + block_size])
        # Every value once, the rest drawn: no state of the block may vanish.
        drawn = np.concatenate([values, rng.choice(values, length - len(values))])
        mixed[start : start + block_size] = rng.permutation(drawn)
    return mixed


@dataclass(frozen=True)
class State(Sample):
    """The state before step t; all ``[response]``. masked: hidden from the model. now: decided at t
    (A_t). later: decided after t, in blocks that are there at t (B_t). deferrable: those of B_t
    that the defer term looks at."""

    masked: Bools
    now: Bools
    later: Bools
    deferrable: Bools


def state_at(
    rollout: Rollout, steps: Ints, t: int, terms: Any, end_ids: tuple[int, ...], index: int
) -> State:
    """Return the state of a rollout before step t, whose tokens are decided at `steps`.

    The response ends with the last block that is there at t, which a block-causal student could
    not see beyond anyway; it is whole where a bidirectional teacher sees it too. terms: the section
    `objective` of WINO+.
    """
    position = np.arange(len(steps))
    block = position // rollout.block_size
    # bool [response]: the pipeline had appended the token's block before step t.
    there = np.array(rollout.append_steps)[block] <= t
    answer = answer_length(rollout, end_ids)
    counted = there & (terms.tail | (position < answer))
    now, later = counted & (steps == t), counted & (steps > t)
    # The block of the first token of A_t, as the official code limits R_t (`scope: block`).
    current = block == block[np.argmax(now)]
    # The rest is all masked and seen by nobody, so it would only take room in a row.
    kept = len(steps) if terms.kl_weight else int(there.sum())
    return State(
        index,
        list(rollout.prompt_ids),
        list(rollout.generated_ids[:kept]),
        min(answer, kept),
        masked=(steps >= t)[:kept],
        now=now[:kept],
        later=later[:kept],
        deferrable=(later & (current | (terms.scope == "all")))[:kept],
    )


def answer_length(rollout: Rollout, end_ids: tuple[int, ...]) -> int:
    """Count the generated tokens up to and with the first end token."""
    ends = [i for i, token in enumerate(rollout.generated_ids) if token in end_ids]
    return ends[0] + 1 if ends else len(rollout.generated_ids)


class StateStream(Stream):
    """Every state of every rollout once an epoch, in an order of the epoch's own. `sample(i)` does
    not depend on any other call.

    terms: the section `objective` of WINO+. chosen: numbers of the rollouts, by default all.
    """

    def __init__(
        self,
        data: Data,
        rollouts: list[Rollout],
        terms: Any,
        end_ids: tuple[int, ...],
        seed: int,
        chosen: Collection[int] | None = None,
    ):
        self.data, self.rollouts, self.terms, self.seed = data, rollouts, terms, seed
        self.end_ids = end_ids
        self.chosen = range(len(rollouts)) if chosen is None else chosen
        self.steps: list[Ints] = []
        self.states: list[tuple[int, int]] = []  # (rollout, step)
        for i, rollout in enumerate(rollouts):
            tokens = len(rollout.prompt_ids) + len(rollout.generated_ids)
            if tokens > data.row_length:
                raise InputError(
                    f"{data.file}, line {i + 2} has {tokens} tokens, data.row_length is "
                    f"{data.row_length}"
                )
            steps = np.array(rollout.trajectory_accepted)
            if terms.trajectory == "random":
                rng = noise.sample_rng(seed, i, noise.RATIOS)
                steps = random_steps(steps, rollout.block_size, rng)
            self.steps.append(steps)
            if i in self.chosen:
                trained = steps if terms.tail else steps[: answer_length(rollout, end_ids)]
                # Distinct steps only: a forward that decided nothing for good leaves no state.
                self.states += ((i, int(t)) for t in np.unique(trained))

    def sample(self, index: int) -> State:
        """Return state `index`."""
        i, t = self.states[self.row(index)]
        return state_at(self.rollouts[i], self.steps[i], t, self.terms, self.end_ids, index)

    @property
    def epoch(self) -> int:
        return len(self.states)

    @property
    def epoch_samples(self) -> int:
        return len(self.states)

    def where(self, index: int) -> str:
        i, t = self.states[self.row(index)]
        return f"{self.data.file}, line {i + 2}, before step {t}"

    def report(self) -> str:
        return f"{len(self.states)} states of {len(self.chosen)} rollouts"
