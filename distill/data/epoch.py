"""What a step and an epoch of a stream hold, found by packing the first steps."""

from __future__ import annotations

from dataclasses import dataclass

from distill.data.packing import fill_rows
from distill.data.screen import Fate
from distill.data.stream import Stream


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
