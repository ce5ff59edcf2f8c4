"""The samples of a held-out loss: rows of the data that are then not trained on, a file of its own,
or generated problems of another split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d2f.errors import InputError
from distill.data.samples import HeldOut
from distill.data.stream import Stream

if TYPE_CHECKING:
    from distill.config import TrainConfig


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
