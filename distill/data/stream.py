"""Samples by index, from generated tasks or from the records of a file or data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from d2f import noise
from d2f.data import BadRecord
from d2f.errors import InputError
from d2f.tasks import make_problem
from d2f.tasks.task import RESPONSE_LENGTH
from distill.config import Data
from distill.data.samples import (
    Encoded,
    Encoder,
    Fate,
    HeldOut,
    Pair,
    Placed,
    Sample,
    Screen,
    open_source,
)

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from distill.config import TrainConfig


class Stream:
    """Samples by index. `sample(i)` does not depend on any other call.

    end_id: fills the tail, and ends a response where `data.end_token` does not say otherwise. tail:
    whether samples carry end tokens after the first. mask_id: the model's, which no text of a file
    may contain. screen: of the records of a file or data set, None for generated tasks. held_out:
    what is kept for a held-out loss (`distill.data.stream`). Raises InputError for data that
    cannot be trained on.
    """

    screen: Screen | None = None
    held_out: HeldOut | None = None

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        end_id: int,
        seed: int,
        tail: bool,
        mask_id: int | None = None,
    ):
        self.data, self.end_id, self.seed, self.tail = data, end_id, seed, tail
        self.encoder = Encoder(data, tokenizer, end_id, mask_id)
        self._draw: Callable[[int], tuple[Encoded, int] | None]
        if data.tasks is not None:
            self._names = list(data.tasks)
            shares = np.array(list(data.tasks.values()), dtype=float)
            self._shares = shares / shares.sum()
            self._draw = self._from_tasks
        else:
            self.screen = Screen(open_source(data), data, self.encoder)
            self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=int))
            self._draw = self._from_records

    def sample(self, index: int) -> Sample | None:
        """Sample `index`, None where its record is left out. Raises InputError if it cannot fit in
        a row, or where every record is left out."""
        drawn = self._draw(index)
        if drawn is None:
            assert self.screen is not None
            if not self.screen.measured:  # else it was looked at before the first sample
                self.screen.refuse_nothing_left()
            return None
        sample = self._sample(index, *drawn)
        if len(sample) > self.data.row_length:
            raise InputError(
                f"sample {index} has {len(sample)} tokens, data.row_length is "
                f"{self.data.row_length}"
            )
        return sample

    def hold_out(self, most: int | None) -> list[Sample]:
        """Take records out of the stream, drawn by the seed from those that can be trained on: at
        most so many, None for all. Their samples, whose index is the record's number."""
        assert self.screen is not None
        found: list[Sample] = []
        rng = noise.sample_rng(self.seed, 0, noise.HELD_OUT)
        for record in rng.permutation(len(self.screen)).tolist():
            if len(found) == most:
                break
            encoded = self.screen.encoded(record)
            if encoded is not None:
                found.append(self._sample(record, encoded, self._full(encoded)))
                self.screen.hold_out(record)
        return found

    def generated(self, index: int, split: str) -> Sample:
        """Sample `index` of another split of the generated tasks than the one that is trained
        on. Raises InputError."""
        return self._sample(index, *self._from_tasks(index, split))

    def _sample(self, index: int, encoded: Encoded, full: int) -> Sample:
        """With its tail. full: length that a padded response is filled up to."""
        response = list(encoded.response)
        kept = len(response)
        if self.tail and response[-1] == self.encoder.end_id:  # else it was cut
            # A generator for each purpose: whether a tail is drawn changes no other draw of the
            # sample.
            rng = noise.sample_rng(self.seed, index, noise.TAIL)
            if rng.random() < self.data.padded_share:
                extra = max(0, full - kept)
            else:
                extra = int(rng.integers(self.data.short_tail + 1))
            # The tail is cut to what prompt and answer leave of the row.
            extra = min(extra, max(0, self.data.row_length - len(encoded.prompt) - kept))
            response += [self.end_id] * extra
        return Sample(index, encoded.prompt, response, kept)

    @property
    def epoch(self) -> int | None:
        """Indexes of an epoch, those left out included; None for generated tasks, which have
        none."""
        return None if self.screen is None else len(self.screen)

    def record(self, index: int) -> int:
        """The record of a file or data set that sample `index` comes from: each epoch has an order
        of its own, from (seed, epoch)."""
        assert self.screen is not None
        epoch, place = divmod(index, len(self.screen))
        # Only the current epoch's order is kept; any other is drawn again from (seed, epoch).
        if epoch != self._order[0]:
            rng = noise.sample_rng(self.seed, epoch, noise.ORDER)
            self._order = (epoch, rng.permutation(len(self.screen)))
        return int(self._order[1][place])

    def where(self, index: int) -> str:
        """Where sample `index` comes from."""
        if self.screen is None:
            return "generated"
        return self.screen.source.where(self.record(index))

    def report(self) -> str | None:
        """What was left out and cut, in one line; None for generated tasks."""
        return None if self.screen is None else self.screen.report()

    def counts(self) -> dict[str, int]:
        """What was left out and cut so far, for the log of a run on a set that is too large to
        measure at its start; else nothing, as `report` says all."""
        return {} if self.screen is None or self.screen.measured else self.screen.counts()

    def _from_tasks(self, index: int, split: str = "train") -> tuple[Encoded, int]:
        # From the index alone: any sample is found without those before it.
        rng = noise.sample_rng(self.seed, index, noise.CONTENT)
        name = self._names[int(rng.choice(len(self._names), p=self._shares))]
        problem = make_problem(name, split, index, self.seed)
        pair = Pair([{"role": "user", "content": problem.question}], problem.answer)
        encoded = self.encoder.encode([pair])[0]
        if isinstance(encoded, BadRecord):
            raise InputError(f"sample {index} of the task {name}: {encoded}")
        # The full length, to which padded samples are filled: that of decoding the task.
        return encoded, RESPONSE_LENGTH[name]

    def _from_records(self, index: int) -> tuple[Encoded, int] | None:
        assert self.screen is not None
        encoded = self.screen.encoded(self.record(index))
        if encoded is None:
            return None
        return encoded, self._full(encoded)

    def _full(self, encoded: Encoded) -> int:
        """The full length of a record's response."""
        return self.data.max_response or self.data.row_length - len(encoded.prompt)


def make_stream(config: TrainConfig, model: DiffusionModel, *, tail: bool) -> Stream:
    """The stream of a run. tail: see Stream. Raises InputError, before any record is read, for a
    model or tokenizer that the objective cannot be trained with."""
    data, tokenizer = config.data, model.tokenizer
    name = config.init or config.tokenizer or "this model"
    if tokenizer is None:
        raise InputError(f"{name}: training needs a tokenizer, the checkpoint has none")
    if config.objective.masks and model.mask_id is None:
        raise InputError(
            f"{name}: objective {config.objective.name} needs a mask token, the model has none: "
            "give its contract a mask_id or its tokenizer a mask_token"
        )
    if not model.end_ids:
        raise InputError(f"{name}: training needs an end token, the model has none")
    end_id = Encoder(data, tokenizer, model.end_ids[0], model.mask_id).end_id
    if end_id not in model.end_ids:
        raise InputError(
            f"data.end_token {data.end_token!r} has id {end_id}, but decoding stops at "
            f"{', '.join(map(str, model.end_ids))}"
        )
    return Stream(data, tokenizer, model.end_ids[0], config.seed, tail, model.mask_id)


# Samples packed into rows: the same stream whatever the processes or resumes.
#
# A row is `data.row_length` places that are fed as one sequence; its samples do not see each other.
# A step is `data.rows` rows, over all processes. Samples are taken in order; each goes to the first
# row with room; the first that fits nowhere opens the next step. So the position in the data is one
# number. Two rows of 8 places and samples 0, 1, 2, ... of 5, 4, 3, 4 and 2 tokens:
#
#     row 0      0 0 0 0 0 2 2 2    sample 2 fits in beside 0
#     row 1      1 1 1 1 3 3 3 3    sample 4 fits in neither: it is the first of the next step
#     positions  0 1 2 3 4 0 1 2    in row 0; each sample counts its own


def fill_rows(stream: Stream, first: int) -> tuple[list[list[Placed]], int]:
    """The packed rows of the step that begins at sample `first`, and the next step's first.
    Samples that the stream leaves out are passed over. Raises InputError as the stream does."""
    rows: list[list[Placed]] = [[] for _ in range(stream.data.rows)]
    used = [0] * len(rows)
    index = first
    while True:
        sample = stream.sample(index)
        if sample is None:
            # A left-out record keeps its index: the order does not depend on what is left out.
            index += 1
            continue
        place = next(
            (i for i, n in enumerate(used) if n + len(sample) <= stream.data.row_length), None
        )
        # Room that is left stays empty, so that the next step begins at one sample and a resume
        # needs no more than its number.
        if place is None:
            return rows, index
        rows[place].append(Placed(sample, used[place]))
        used[place] += len(sample)
        index += 1


def lay_out(rows: list[list[Placed]], length: int) -> tuple[Tensor, Tensor]:
    """Clean ids and positions, int64 ``[rows, length]``; unused places hold 0."""
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros_like(ids)
    for r, row in enumerate(rows):
        for placed in row:
            part = slice(placed.start, placed.start + len(placed.sample))
            ids[r, part] = placed.sample.prompt + placed.sample.response
            positions[r, part] = np.arange(len(placed.sample))
    return torch.from_numpy(ids), torch.from_numpy(positions)


# What a step and an epoch of a stream hold, found by packing the first steps.


@dataclass(frozen=True)
class Plan:
    """What was found by packing `steps` steps, as means over them.

    tokens_per_step: places that hold a sample, of `places_per_step`. response_tokens_per_step: of
    them, those that noise may mask. samples_per_epoch, steps_per_epoch: None for generated tasks,
    which never repeat. The first is an estimate where the records are not measured
    (`data.measure_rows`), the second where is_exact is false, as not all of an epoch was packed.
    """

    steps: int
    samples_per_step: float
    tokens_per_step: float
    response_tokens_per_step: float
    places_per_step: int
    samples_per_epoch: int | None
    steps_per_epoch: float | None
    is_exact: bool

    @property
    def filled(self) -> float:
        """Share of the places of a step that hold a sample."""
        return self.tokens_per_step / self.places_per_step


def plan(stream: Stream, most_steps: int = 20) -> Plan:
    """Pack steps until an epoch is through, at most `most_steps`; further ones are like these.
    Raises InputError as the stream does, ValueError for most_steps under 1."""
    if most_steps < 1:
        raise ValueError(f"most_steps must be at least 1, got {most_steps}")
    index = steps = samples = tokens = response = 0
    while steps < most_steps and (stream.epoch is None or index < stream.epoch):
        # Where the last step of an epoch goes over into the next one, it is counted whole.
        rows, index = fill_rows(stream, index)
        steps += 1
        for placed in (placed for row in rows for placed in row):
            samples += 1
            tokens += len(placed.sample)
            response += len(placed.sample.response)
    data, epoch = stream.data, stream.epoch
    used = epoch
    if stream.screen is not None and epoch is not None:
        if stream.screen.measured:
            used = stream.screen.count(Fate.WHOLE, Fate.TRUNCATED)
        else:
            # Some of the indexes so far were left out: the same share of the rest is assumed.
            used = samples * epoch // index
    return Plan(
        steps=steps,
        samples_per_step=samples / steps,
        tokens_per_step=tokens / steps,
        response_tokens_per_step=response / steps,
        places_per_step=data.rows * data.row_length,
        samples_per_epoch=used,
        steps_per_epoch=None if epoch is None else epoch / index * steps,
        is_exact=epoch is not None and index >= epoch,
    )


# The samples of a held-out loss: rows of the data that are then not trained on, a file of its own,
# or generated problems of another split.


def hold_out(config: TrainConfig, stream: Stream) -> HeldOut | None:
    """What the configuration holds out, taken out of the stream where it is of its records; None
    where it asks for no held-out loss. Raises InputError for more rows than there are."""
    settings, rows = config.evaluation, config.evaluation.loss_rows
    if settings.loss_file is not None:
        return _rows(_of_file(settings.loss_file, stream), rows, trained=stream)
    if rows is None:
        return None
    if stream.screen is not None:
        return _rows(stream, rows, trained=stream)
    samples = [stream.generated(index, settings.split) for index in range(rows)]
    return HeldOut(samples, f"{rows} generated problems of the split {settings.split}")


def _of_file(file: str, stream: Stream) -> Stream:
    """A stream over another file, which is read as the stream's own data is."""
    nothing = dict.fromkeys(("tasks", "dataset", "dataset_config", "split"))
    data, encoder = stream.data.model_copy(update=nothing | {"file": file}), stream.encoder
    found = Stream(
        data, encoder.tokenizer, stream.end_id, stream.seed, stream.tail, encoder.mask_id
    )
    assert found.screen is not None
    if stream.screen is not None and found.screen.source.digest == stream.screen.source.digest:
        raise InputError(f"evaluation.loss_file {file} is what is trained on: expected other rows")
    return found


def _rows(source: Stream, rows: int | None, *, trained: Stream) -> HeldOut:
    """Rows of `source`, with a warning where the stream that is trained on has their prompts."""
    assert source.screen is not None
    samples = source.hold_out(rows)
    name = source.screen.source.name
    if rows is not None and len(samples) < rows:
        raise InputError(
            f"evaluation.loss_rows must be at most {len(samples)}, the rows of {name} that can be "
            f"used, got {rows}"
        )
    said = f"{len(samples)} of {len(source.screen)} rows of {name}"
    if trained.screen is not None:
        trained.screen.refuse_nothing_left()
        # Of a set that is too large to measure it would take too long to read every prompt.
        if trained.screen.measured:
            asked = {source.screen.prompt(sample.index) for sample in samples}
            shared = trained.screen.count_asking(asked)
            if shared:
                said += f"; warning: {shared} rows that are trained on have a prompt of theirs"
    return HeldOut(samples, said)
