"""The rows of a batch job: what each asks, and what a model answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from d2f.data_records import BadRecord, Source, Table, open_records
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.cluster.workers import chunk_size
from decode.commands.timed_loop import EncodedPrompt, results
from decode.decoders import Decoder
from decode.engine.prompts import Prompt, checked
from decode.engine.result import Result

COLUMNS = ("messages", "prompt", "question", "ids")
FIELDS = ("row", "text", "tokens", "forwards", "finish_reason", "seed")  # of an answer
OF_INPUT = "input_"  # before a field of the input that has the name of one of ours
_FILES = (".jsonl", ".json", ".parquet")
_LOOKED_AT = 100  # rows, before any weights are read


@dataclass(frozen=True)
class Answer:
    """A row's line. row: its number in the input, from 0. tokens: visible ids, cut before the end
    token or stop string. error: why there is no answer, None where there is one."""

    row: int
    text: str | None = None
    tokens: tuple[int, ...] = ()
    forwards: int = 0
    finish_reason: str = ""
    seed: int = 0
    error: str | None = None

    @staticmethod
    def of(row: int, result: Result) -> Answer:
        if result.error is not None:
            error = f"{type(result.error).__name__}: {result.error}"
            return Answer(row, forwards=result.forwards, error=error)
        tokens = tuple(result.tokens)
        return Answer(
            row, result.text, tokens, result.forwards, result.finish_reason, result.seed
        )  # fmt: skip


def open_rows(place: str, config: str | None, split: str | None) -> Source:
    """The rows of --input. Raises InputError."""
    is_file = Path(place).is_file() or place.endswith(_FILES)
    if is_file and (config is not None or split is not None):
        raise InputError("--split and --dataset-config are for data sets, not for a file")
    return open_records(place, is_file=is_file, config=config, split=split)


def asked_columns(source: Source, column: str | None) -> tuple[str, ...]:
    """Where a row may say what it asks. Raises InputError where a table has none of them, or none
    of the first rows says it."""
    columns: tuple[str, ...] = COLUMNS if column is None else (column,)
    if isinstance(source, Table):
        columns = tuple(name for name in columns if name in source.columns)
        if not columns:
            raise InputError(
                f"{source.name}: expected the column {column or ' or '.join(COLUMNS)}, it has "
                f"{', '.join(source.columns)}; --column names another"
            )
        source.select(columns)
    looked_at = [asked(source, number, columns) for number in range(min(len(source), _LOOKED_AT))]
    if all(isinstance(prompt, BadRecord) for prompt in looked_at):
        raise InputError(f"{source.where(0)}: {looked_at[0]}; so are all rows looked at")
    return columns


def asked(source: Source, number: int, columns: tuple[str, ...]) -> Any:
    """What a row asks, a BadRecord where it cannot be read."""
    row = source.attempt(number)
    if isinstance(row, BadRecord):
        return row
    if not isinstance(row, Mapping):
        return BadRecord(f"expected an object of columns, got {str(row)[:60]!r}")
    try:
        renamed(list(row))
    except BadRecord as error:  # nor could its answer be written
        return error
    found = [row[name] for name in columns if row.get(name) is not None]
    if found:
        return found[0]
    keys = ", ".join(f"{name} (null)" if value is None else name for name, value in row.items())
    return BadRecord(f"expected {' or '.join(columns)}, got the keys {keys}")


def renamed(names: Sequence[str]) -> list[str]:
    """The names of the input's fields beside ours. Raises BadRecord."""
    found = [OF_INPUT + name if name in FIELDS else name for name in names]
    if len(set(found)) < len(found):
        twice = next(name for name in names if name in FIELDS and OF_INPUT + name in names)
        raise BadRecord(f"cannot have both {twice} and {OF_INPUT}{twice}")
    return found


def answer_rows(
    model: DiffusionModel,
    rows: Iterable[tuple[int, Prompt | BadRecord]],
    *,
    decoder: Decoder,
    raw: bool,
    batch_size: int,
) -> Iterator[tuple[int, Answer]]:
    """The answer to each row, as they finish, bad ones too. At a temperature a row has a seed of
    its own, made of the decoder's and the row's number."""
    rest = iter(rows)
    while some := list(islice(rest, chunk_size(batch_size))):
        ready: dict[int, EncodedPrompt] = {}
        for number, prompt in some:
            try:
                if isinstance(prompt, BadRecord):
                    raise prompt
                ids, own = checked(model, prompt, decoder, f"row {number}", raw=raw)
                ready[number] = ids, own.sampled(number, 0)
            except (InputError, BadRecord) as error:
                yield number, Answer(number, error=str(error))
        for number, result in results(model, ready.items(), batch_size=batch_size):
            yield number, Answer.of(number, result)
