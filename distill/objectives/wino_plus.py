"""WINO+ (trajectory injection; specification from the paper and its code): a model learns to decide
at once what the decoder with revocations decided for good, and to be unsure of what it would get
wrong.

For the state before step t, with A_t the tokens decided at t and B_t those decided later, y the
final tokens, and the model's prediction v with confidence c and entropy H (nats) at each of them:

    L         = L_tok + L_defer + lambda L_sharp + beta L_kl
    L_tok     = mean over A_t of the cross-entropy with y
    L_defer   = - mean over R_t of H,  R_t = {l in B_t : v != y, c >= tau1}
    L_sharp   = mean over C_t of H,    C_t = {l in A_t : v = y, c < tau2}
    L_kl      = mean over B_t without R_t of KL(teacher || student)

A response of four tokens, decided at the steps 0 2 1 1, as it is fed before step t = 1 (M: masked):

    position  0  1  2  3
    fed       y  M  M  M
    A_1             x  x    learn y; in C_1 too where v = y but c < tau2: made surer
    B_1          x          in R_1 where v != y and c >= tau1: made less sure; else it learns the
                            teacher's distribution (L_kl)

R_t and C_t are chosen without gradient, the mean of an empty set is 0. The last term goes with
D2F: the teacher is the same weights without the adapter, bidirectional, on the same masked input.
The paper has no tail and no L_kl; its code takes R_t from the block of the first token of A_t only
(`scope: block`) and asks for c > tau1. A prediction is the decoder's: never the mask id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from d2f import noise, spans
from d2f.config import Ratio, Section, Switch, Tokens, Weight
from d2f.errors import InputError
from distill.config import Data, Lora, Options, TrainConfig
from distill.data.samples import HeldOut, Sample
from distill.data.stream import Stream
from distill.objectives.base import (
    Batch,
    Objective,
    Rows,
    gathered,
    rows_at_a_time,
    sum_in_parts,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from d2f.model import DiffusionModel

Count = Annotated[int, Field(ge=0)]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
HEADER = "rollouts"  # the key of the first line


# Rollouts, and the states on their way.
#
# A rollout is a verified response with the step (forward, from 0) that decided each token for good:
# ``t_l = min{t : y_l is the final token after every forward j >= t}``. Its states are what the
# decoder saw before each forward that decided something for good: the tokens with ``t_l < t``
# revealed, the others masked. Four tokens a b c d with steps 0 2 1 1 have three states (M: masked):
#
#     before step 0    M M M M    a is decided now, the others later
#     before step 1    a M M M    c and d now, b later
#     before step 2    a M c d    b now
#
# `distill.rollouts` writes the file that is read here: the settings of its run, then a line a
# rollout, in the order of the problems.


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
    rollout: Rollout,
    steps: Ints,
    t: int,
    terms: WinoPlusOptions,
    end_ids: Sequence[int],
    index: int,
) -> State:
    """Return the state of a rollout before step t, whose tokens are decided at `steps`.

    The response ends with the last block that is there at t, which a block-causal student could
    not see beyond anyway; it is whole where a bidirectional teacher sees it too.
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


def answer_length(rollout: Rollout, end_ids: Sequence[int]) -> int:
    """Count the generated tokens up to and with the first end token."""
    ends = [i for i, token in enumerate(rollout.generated_ids) if token in end_ids]
    return ends[0] + 1 if ends else len(rollout.generated_ids)


class StateStream(Stream):
    """Every state of every rollout once an epoch, in an order of the epoch's own. `sample(i)` does
    not depend on any other call.

    chosen: numbers of the rollouts, by default all.
    """

    def __init__(
        self,
        data: Data,
        rollouts: list[Rollout],
        terms: WinoPlusOptions,
        end_ids: Sequence[int],
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


# The loss.


class WinoPlusOptions(Options):
    """WINO+, on the rollouts in data.file."""

    prompt_rule = "bidirectional"

    block_size: Tokens = 16
    """Block size of the rollouts."""
    tau1: Ratio = 0.6
    """Confidence from which a wrong prediction of a later token is deferred; below tau2."""
    tau2: Ratio = 0.9
    """Confidence below which a right prediction of this step is sharpened."""
    defer_weight: Weight = 1.0
    """Weight of deferring; 0 leaves the term out."""
    sharpen_weight: Weight = 0.1
    """Weight of sharpening (the paper's lambda); 0 leaves the term out."""
    scope: Literal["all", "block"] = "all"
    """Later tokens that may be deferred: all, or as the official code those of the block."""
    tail: Switch = True
    """Train tokens after the first end token too."""
    trajectory: Literal["recorded", "random"] = "recorded"
    """random: the paper's ablation."""
    mask: Literal["bidirectional", "block_causal"] = "bidirectional"
    """Mask of the trained model."""
    kl_weight: Weight = 0.0
    """Weight of KL(teacher || student) (the paper's beta)."""
    lora: Lora = Lora()
    """The adapter that is trained."""

    @model_validator(mode="after")
    def _ordered(self) -> WinoPlusOptions:
        if self.tau1 >= self.tau2:
            raise ValueError(f"tau1 must be below tau2, got {self.tau1} and {self.tau2}")
        return self

    def check(self, config: TrainConfig) -> None:
        if config.data.file is None:
            raise ValueError("objective wino_plus needs data.file: a file of distill.rollouts")
        super().check(config)

    def contract(self) -> dict[str, object]:
        found = super().contract()
        if self.mask == "block_causal":  # a D2F student, whatever it was trained by
            found |= {"objective": "d2f", "prompt_rule": "block"}
        return found


@dataclass(frozen=True)
class StateBatch(Batch):
    """Hold one process's part of a step; all ``[N]``, one a row that is read.

    weight: the share of the row's state in the step's loss. state: int64, which state the row
    belongs to. now, later, deferrable: as in `State`.
    """

    state: Tensor
    now: Tensor
    later: Tensor
    deferrable: Tensor


class WinoPlusObjective(Objective):
    """Train by WINO+ on the rollouts in `data.file`. Raises InputError for rollouts that do not
    fit the model or the configuration."""

    section = WinoPlusOptions

    def __init__(self, model: DiffusionModel, config: TrainConfig):
        super().__init__(model, config)
        self.reads_teacher = self.options.kl_weight > 0
        self.rollouts = self._read(config.data.file)

    def stream(self) -> StateStream:
        config, file = self.config, self.config.evaluation.loss_file
        ends, seed = self.model.end_ids, config.seed
        if not config.evaluation.wants_loss:
            return StateStream(config.data, self.rollouts, self.options, ends, seed)
        # Whole rollouts are held out: the states of one are too much alike.
        others = self.rollouts if file is None else self._read(file)
        count, most = config.evaluation.loss_rows, len(others) - (file is None)
        if file is not None and others == self.rollouts:
            raise InputError(
                f"evaluation.loss_file {file} is what is trained on: expected other rollouts"
            )
        if (count or 0) > most:
            raise InputError(
                f"evaluation.loss_rows must be at most {most} of the {len(others)} rollouts of "
                f"{file or config.data.file}, got {count}"
            )
        rng = noise.sample_rng(seed, 0, noise.HELD_OUT)
        held = set(rng.permutation(len(others))[:count].tolist())
        data = config.data.model_copy(update={"file": file or config.data.file})
        answers = self.options.model_copy(update={"tail": False})
        states = StateStream(data, others, answers, ends, seed, held)
        rest = set(range(len(self.rollouts))) - (held if file is None else set())
        stream = StateStream(config.data, self.rollouts, self.options, ends, seed, rest)
        said = f"{states.report()}, of the {len(others)} of {data.file}"
        stream.held_out = HeldOut([states.sample(i) for i in range(states.epoch)], said)
        return stream

    def counted(self, batch: Batch) -> Tensor:
        assert isinstance(batch, StateBatch)
        return batch.now

    def draw(self, sample: Sample) -> tuple[np.ndarray, np.ndarray]:
        # A state's mask is that of its trajectory. Without the teacher's term, of the later tokens
        # only those that may be deferred are read.
        assert isinstance(sample, State)
        others = sample.later if self.reads_teacher else sample.deferrable
        return sample.masked, (sample.now | others).astype(float)

    def normalizer(self, sample: Sample, read: np.ndarray) -> float:
        return 1.0  # every state of the step counts the same, in whichever process it is

    def sample_spans(self, sample: Sample) -> Tensor:
        if self.options.mask == "block_causal":
            return spans.block_causal(len(sample), len(sample.prompt), self.options.block_size)
        return spans.bidirectional(len(sample))

    def batch(self, rows: Rows, mine: slice) -> StateBatch:
        import torch

        states, columns = [np.zeros(0, dtype=np.int64)], [np.zeros((0, 3), dtype=bool)]
        for number, placed in enumerate(placed for row in rows[mine] for placed in row):
            state = placed.sample
            assert isinstance(state, State)
            read = self.draw(state)[1] > 0
            columns.append(np.stack([state.now, state.later, state.deferrable], axis=1)[read])
            states.append(np.full(int(read.sum()), number))
        now, later, deferrable = torch.from_numpy(np.concatenate(columns)).unbind(1)
        return StateBatch(
            **vars(super().batch(rows, mine)),
            state=torch.from_numpy(np.concatenate(states)),
            now=now,
            later=later,
            deferrable=deferrable,
        )

    def forward(self, batch: Batch) -> Tensor:
        assert isinstance(batch, StateBatch)
        settings = self.options
        teacher = self.read_teacher(batch) if self.reads_teacher else None
        student = self.read(batch, batch.spans)
        # The sets are chosen by the student's own predictions, and are no part of its gradient.
        confidence, token = self.predictions(student)
        right = token == batch.targets
        defer = batch.deferrable & ~right & (confidence >= settings.tau1)  # R_t
        sharpen = batch.now & right & (confidence < settings.tau2)  # C_t
        # Subtracted: a lower loss is a higher entropy where the prediction is sure and wrong.
        by_entropy = settings.sharpen_weight * _mean_weight(batch, sharpen)
        by_entropy = by_entropy - settings.defer_weight * _mean_weight(batch, defer)
        loss = self._on_logits(student, batch.targets, _mean_weight(batch, batch.now), by_entropy)
        if teacher is not None:
            # A deferred token would be pulled both ways, towards the teacher's distribution and
            # towards a higher entropy.
            from triton_kernels.masked_kl import masked_linear_kl

            teach = batch.later & ~defer
            weight = settings.kl_weight * _mean_weight(batch, teach)
            head = gathered(self.model.backbone.lm_head.weight)
            rows = teach.nonzero()[:, 0]  # logits of the others would be made for a weight of 0
            loss = loss + masked_linear_kl(student[rows], teacher[rows], head, weight[rows])
        return loss

    def predictions(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return (confidence, token id) ``[N]`` of hidden states ``[N, C]``, as decoding does."""
        import torch

        found = []
        with torch.no_grad():
            for part in hidden.split(rows_at_a_time(self.model.vocab_size)):
                logits = self.model.head(part).float()  # [n, V]
                total = logits.logsumexp(-1)
                # Behind the softmax's total: the confidence is that under the full softmax.
                logits[:, self.mask_id] = -torch.inf
                best, token = logits.max(-1)
                found.append(((best - total).exp(), token))
        confidences, tokens = zip(*found, strict=True)
        return torch.cat(confidences), torch.cat(tokens)

    def _on_logits(
        self, hidden: Tensor, targets: Tensor, by_token: Tensor, by_entropy: Tensor
    ) -> Tensor:
        """Sum by_token x cross-entropy + by_entropy x entropy over the rows that have a weight,
        ``[N]`` each."""
        import torch

        def of_part(hidden: Tensor, targets: Tensor, *by: Tensor) -> Tensor:
            log_p = self.model.head(hidden).log_softmax(-1, dtype=torch.float32)  # [n, V]
            token = -log_p.gather(1, targets[:, None])[:, 0]
            entropy = -(log_p.exp() * log_p).sum(-1)
            return (by[0] * token + by[1] * entropy).sum()

        rows = ((by_token != 0) | (by_entropy != 0)).nonzero()[:, 0]
        columns = hidden[rows], targets[rows], by_token[rows], by_entropy[rows]
        return sum_in_parts(of_part, columns, rows_at_a_time(self.model.vocab_size))

    def _read(self, file: str | None) -> list[Rollout]:
        """Read a file of rollouts. Raises InputError unless it was decoded with the tokenizer of
        this model, and under the mask and block size of the configuration."""
        assert file is not None and self.model.tokenizer is not None
        run, rollouts = read_rollouts(file)
        expected = {
            "mask_id": self.mask_id,
            "tokenizer": tokenizer_hash(self.model.tokenizer),
            "mask": self.options.mask,
        }
        for name, value in expected.items():
            if run.get(name) != value:
                raise InputError(
                    f"{file} was collected with another {name}: expected {value!r}, "
                    f"got {run.get(name)!r}"
                )
        for number, rollout in enumerate(rollouts, 2):
            if rollout.block_size != self.options.block_size:
                raise InputError(
                    f"{file}, line {number} was decoded in blocks of {rollout.block_size}: "
                    f"expected those of block_size, {self.options.block_size}"
                )
        return rollouts


def _mean_weight(batch: StateBatch, chosen: Tensor) -> Tensor:
    """Return weights ``[N]`` under which a sum over rows is the mean over each state's chosen rows,
    times that state's share of the step. A state without a chosen row adds nothing."""
    each = chosen.float()
    count = each.new_zeros(len(each)).index_add(0, batch.state, each)[batch.state]
    return batch.weight * each / count.clamp(min=1)
