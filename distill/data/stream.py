"""Samples by index, from generated tasks or from the records of a file or data set."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from transformers import PreTrainedTokenizerBase

from d2f import noise
from d2f.data_records import BadRecord
from d2f.errors import InputError
from d2f.tasks import make_problem
from d2f.tasks.registry import RESPONSE_LENGTH
from distill.data.columns import Pair
from distill.data.data_config import Data
from distill.data.encode import Encoded, Encoder
from distill.data.samples import HeldOut, Sample
from distill.data.screen import Screen
from distill.data.sources import open_source

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from distill.config import TrainConfig


class Stream:
    """Samples by index. `sample(i)` does not depend on any other call.

    end_id: fills the tail, and ends a response where `data.end_token` does not say otherwise. tail:
    whether samples carry end tokens after the first. mask_id: the model's, which no text of a file
    may contain. screen: of the records of a file or data set, None for generated tasks. held_out:
    what is kept for a held-out loss (`distill.data.held_out`). Raises InputError for data that
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
    if config.kind.masks and model.mask_id is None:
        raise InputError(
            f"{name}: objective {config.objective} needs a mask token, the model has none: "
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
