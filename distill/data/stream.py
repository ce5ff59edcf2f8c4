"""Draw samples by index, from generated tasks or from rows, and pack them into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from d2f import noise
from d2f.errors import InputError
from d2f.tasks import make_problem
from d2f.tasks.task import RESPONSE_LENGTH
from distill.config import Data
from distill.data.samples import Encoder, HeldOut, Placed, Rows, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from distill.config import TrainConfig

_AT_ONCE = 1000  # samples


class Stream:
    """Samples by index. `sample(i)` does not depend on any other call.

    end_ids: the first fills the tail, and ends a response where `data.end_token` does not say
    otherwise. tail: whether samples carry end tokens after the first. mask_id: the model's, which
    no text of a file may contain. rows: of a file or data set, None for generated tasks. held_out:
    what is kept for a held-out loss. Raises InputError for data that cannot be trained on.
    """

    rows: Rows | None = None
    held_out: HeldOut | None = None
    _order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=int))  # an epoch and its order

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        seed: int,
        tail: bool,
        mask_id: int | None = None,
    ):
        self.data, self.end_ids, self.seed, self.tail = data, end_ids, seed, tail
        self.encoder = Encoder(data, tokenizer, end_ids, mask_id)
        if data.tasks is None:
            self.rows = Rows(data, self.encoder)

    def sample(self, index: int) -> Sample | None:
        """Return sample `index`, None where its row is left out. Raises InputError if a generated
        one does not fit in a row."""
        if self.rows is None:
            return next(self.generated(index, 1, "train"))
        ids = self.rows.encoded(self.row(index))
        return None if ids is None else self._with_tail(index, *ids)

    def generated(self, first: int, count: int, split: str) -> Iterator[Sample]:
        """Generate so many samples of a split of the tasks. Raises InputError for the first that
        cannot be trained on."""
        assert self.data.tasks is not None
        names, shares = list(self.data.tasks), np.array(list(self.data.tasks.values()), dtype=float)
        problems = []
        for index in range(first, first + count):
            # From the index alone: any sample is found without those before it.
            rng = noise.sample_rng(self.seed, index, noise.CONTENT)
            name = names[int(rng.choice(len(names), p=shares / shares.sum()))]
            problems.append(make_problem(name, split, index, self.seed))
        found = self.encoder.encode_rows(
            {
                "prompt": [problem.question for problem in problems],
                "response": [problem.answer for problem in problems],
            }
        )
        columns = (found[name] for name in ("prompt", "response", "error"))
        for index, (problem, prompt, response, error) in enumerate(
            zip(problems, *columns, strict=True), first
        ):
            if error is not None:
                raise InputError(f"sample {index} of the task {problem.task}: {error}")
            tokens = len(prompt) + len(response)
            if tokens > self.data.row_length:
                raise InputError(
                    f"sample {index} has {tokens} tokens, data.row_length is {self.data.row_length}"
                )
            yield self._with_tail(index, prompt, response, RESPONSE_LENGTH[problem.task])

    def check_generated(self, count: int) -> None:
        """Raise InputError for the first of so many samples that cannot be trained on."""
        for first in range(0, count, _AT_ONCE):
            for _ in self.generated(first, _AT_ONCE, "train"):
                pass

    def _with_tail(
        self, index: int, prompt: list[int], response: list[int], full: int | None = None
    ) -> Sample:
        """Add a tail. full: length that a padded response is filled up to; that of decoding a
        generated task, else all that the configuration leaves it."""
        answer, room = len(response), max(0, self.data.row_length - len(prompt) - len(response))
        if self.tail and response[-1] == self.encoder.end_id:  # else it was cut
            # A generator for each purpose: whether a tail is drawn changes no other draw of the
            # sample.
            rng = noise.sample_rng(self.seed, index, noise.TAIL)
            if rng.random() < self.data.padded_share:
                full = full or self.data.max_response or self.data.row_length - len(prompt)
                extra = max(0, full - answer)
            else:
                extra = int(rng.integers(self.data.short_tail + 1))
            response = response + [self.end_ids[0]] * min(extra, room)
        return Sample(index, prompt, response, answer)

    @property
    def epoch(self) -> int | None:
        """Indexes of an epoch, those left out included; None for generated tasks, which have
        none."""
        return None if self.rows is None else len(self.rows)

    @property
    def epoch_samples(self) -> int | None:
        """Samples of an epoch; None for generated tasks."""
        return None if self.rows is None else int((self.rows.kept > 0).sum())

    def row(self, index: int) -> int:
        """Return the row that sample `index` comes from: each epoch has an order of its own, from
        (seed, epoch). A row that is left out keeps its place, so the order depends on no limit."""
        assert self.epoch is not None
        epoch, place = divmod(index, self.epoch)
        # Only the current epoch's order is kept; any other is drawn again from (seed, epoch).
        if epoch != self._order[0]:
            rng = noise.sample_rng(self.seed, epoch, noise.ORDER)
            self._order = (epoch, rng.permutation(self.epoch))
        return int(self._order[1][place])

    def where(self, index: int) -> str:
        """Say where sample `index` comes from."""
        return "generated" if self.rows is None else self.rows.where(self.row(index))

    def report(self) -> str | None:
        """Say what was left out and cut, in one line; None for generated tasks."""
        return None if self.rows is None else self.rows.report()

    def hold_out(self, most: int | None) -> list[Sample]:
        """Take rows out of the stream (`Rows.hold_out`). Returns their samples, whose index is the
        row's number."""
        assert self.rows is not None
        found = self.rows.hold_out(most, self.seed)
        return [self._with_tail(row, *ids) for row, ids in found.items()]


def fill_rows(stream: Stream, first: int) -> tuple[list[list[Placed]], int]:
    """Pack the rows of the step that begins at sample `first`. Returns them and the next step's
    first. Raises InputError as the stream does.

    A row is `data.row_length` places that are fed as one sequence; its samples do not see each
    other. A step is `data.rows` rows, over all processes. Samples are taken in order; each goes to
    the first row with room; the first that fits nowhere opens the next step. So the position in the
    data is one number, whatever the processes or resumes. Two rows of 8 places and samples 0, 1, 2,
    ... of 5, 4, 3, 4 and 2 tokens:

        row 0      0 0 0 0 0 2 2 2    sample 2 fits in beside 0
        row 1      1 1 1 1 3 3 3 3    sample 4 fits in neither: it is the first of the next step
        positions  0 1 2 3 4 0 1 2    in row 0; each sample counts its own
    """
    rows: list[list[Placed]] = [[] for _ in range(stream.data.rows)]
    used = [0] * len(rows)
    index = first
    while True:
        sample = stream.sample(index)
        if sample is None:
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


@dataclass(frozen=True)
class Plan:
    """Say what a step and an epoch hold: means over the `steps` steps that were packed.

    tokens_per_step: places that hold a sample, of `places_per_step`. response_tokens_per_step: of
    them, those that noise may mask. samples_per_epoch, steps_per_epoch: None for generated tasks,
    which never repeat; the latter is an estimate where is_exact is false, as not all of an epoch
    was packed.
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
    Raises InputError as the stream does."""
    data, epoch, index, steps = stream.data, stream.epoch, 0, 0
    placed: list[Placed] = []
    while steps < most_steps and (epoch is None or index < epoch):
        # The last step of an epoch may go over into the next one; it is counted whole.
        rows, index = fill_rows(stream, index)
        steps += 1
        placed += (each for row in rows for each in row)
    return Plan(
        steps=steps,
        samples_per_step=len(placed) / steps,
        tokens_per_step=sum(len(each.sample) for each in placed) / steps,
        response_tokens_per_step=sum(len(each.sample.response) for each in placed) / steps,
        places_per_step=data.rows * data.row_length,
        samples_per_epoch=stream.epoch_samples,
        steps_per_epoch=None if epoch is None else epoch / index * steps,
        is_exact=epoch is not None and index >= epoch,
    )


def hold_out(config: TrainConfig, stream: Stream) -> HeldOut | None:
    """Return the samples of a held-out loss: rows that are then taken out of the stream, those of a
    file of its own, or generated problems of another split; None where there is no such loss.
    Raises InputError for more rows than there are."""
    settings, most = config.evaluation, config.evaluation.loss_rows
    if not settings.wants_loss:
        return None
    if settings.loss_file is None and stream.rows is None:
        samples = list(stream.generated(0, most or 0, settings.split))
        return HeldOut(samples, f"{most} generated problems of the split {settings.split}")
    source = stream
    if settings.loss_file is not None:  # read as the stream's own data is
        nothing = dict.fromkeys(("tasks", "dataset", "dataset_config", "split"))
        data = stream.data.model_copy(update=nothing | {"file": settings.loss_file})
        tokenizer, mask_id = stream.encoder.tokenizer, stream.encoder.mask_id
        source = Stream(data, tokenizer, stream.end_ids, stream.seed, stream.tail, mask_id)
    assert source.rows is not None
    asked, texts = source.rows.hashes("asked"), source.rows.hashes("text")
    trained = None if stream.rows is None else set(stream.rows.hashes("text").values())
    if source is not stream and trained == set(texts.values()):
        raise InputError(
            f"evaluation.loss_file {settings.loss_file} is what is trained on: expected other rows"
        )
    samples = source.hold_out(most)
    if most is not None and len(samples) < most:
        raise InputError(
            f"evaluation.loss_rows must be at most {len(samples)}, the different rows of "
            f"{source.rows.name} that can be used, got {most}"
        )
    said = f"{len(samples)} of {len(source.rows)} rows of {source.rows.name}"
    if stream.rows is not None:
        stream.rows.refuse_nothing_left()
        prompts = {asked[sample.index] for sample in samples}
        shared = sum(prompt in prompts for prompt in stream.rows.hashes("asked").values())
        if shared:
            said += f"; warning: {shared} rows that are trained on have a prompt of theirs"
    return HeldOut(samples, said)
