"""python -m decode.batch --model tiny-d2f --input prompts.jsonl --output answers

Answers every row of a file or data set, with one model or many at a time. `--help` lists the
options, docs/batch.md says what comes out; the parts are in decode/batching.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import TypeAdapter
from tyro.conf import arg

from d2f.data import BadRecord, JsonLines, Source, Table, open_records
from d2f.errors import InputError, one_line
from d2f.files import locked, writing
from d2f.quiet import quiet
from decode import cli
from decode.cli import (
    DecoderOptions,
    ModelOptions,
    Switch,
    WorkerOptions,
    check_least,
    command,
    followed,
    say,
)
from decode.decoders import Decoder
from decode.display import ShownProgress, standard_output
from decode.engine.prompts import Prompt, checked
from decode.ledger import Ledger, check_folder, json_line, refuse_early
from decode.loop import EncodedPrompt, results
from decode.step import Result
from decode.workers import chunk_size

if TYPE_CHECKING:
    from d2f.model import DiffusionModel
    from decode.workers import Crew


@dataclass(kw_only=True)
class InputOptions:
    """Rows to answer."""

    input: Annotated[str, arg(metavar="FILE")]
    """rows: JSONL, parquet (by its ending), or a data set, which is a folder of save_to_disk or a
    hub name"""
    split: Annotated[str | None, arg(metavar="NAME")] = None
    """of a data set (default: train)"""
    dataset_config: Annotated[str | None, arg(metavar="NAME")] = None
    """of a data set that has several"""
    column: Annotated[str | None, arg(metavar="NAME")] = None
    """what is asked: text, chat messages or token ids (default: the first of messages, prompt,
    question and ids that a row has)"""
    raw: Switch = False
    """take text prompts as they are, without the chat template"""


@dataclass(kw_only=True)
class OutputOptions:
    """How it runs, and what it writes."""

    output: Annotated[str, arg(metavar="DIR")]
    """folder for the answers; one of another run is refused"""
    batch_size: Annotated[int, arg(metavar="N")] = 32
    """rows that each worker decodes together, at least 1; the tokens do not depend on it"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, batch_size=1)


@dataclass(kw_only=True)
class Options(ModelOptions, InputOptions, DecoderOptions, OutputOptions, WorkerOptions):
    """Answer every row of a file or data set: a folder with one file of the input's kind, in its
    order, each row with its own fields and text, tokens, forwards and finish_reason.

    The same command again goes on where it stopped. docs/batch.md says what a row may be and what
    the folder holds.

    Exit status: 0 done; 2 bad input, found before any work, or no row could be answered; 130
    interrupted, what is answered stays and the same command goes on.
    """


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return cli.parse(Options, arguments, usual="python -m decode.batch")


def run(options: Options) -> None:
    """Answer what the options say. Raises InputError before any work, or where no row could be
    answered."""
    from decode.cli import check_options, outline, read_settings
    from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS
    from decode.workers import workers

    # From the cheapest check to the dearest: flags, rows, the model's shape, whose the folder is.
    settings = read_settings(options)
    settings.check([settings.given.get("max_new_tokens") or DEFAULT_MAX_NEW_TOKENS])
    check_options(options)
    source = open_rows(options.input, options.dataset_config, options.split)
    check_names(source)
    columns = asked_columns(source, options.column)
    shape = outline(options.model, options.adapter, options.family, options.tensor_parallel)
    decoder = settings.decoder(
        shape
    )  # with no length where none was given: what the context leaves
    decoder.check(shape.contract)
    facts = {"input": source.digest, "rows": len(source)}
    known = describe(options, shape, "", decoder, facts)
    with locked(check_folder(options.output)) as folder:
        check_free(source, folder)
        refuse_early(folder / LEDGER, known, key="row")
        with (
            workers(options) as crew,
            BatchLedger(folder / LEDGER, crew.ask(describe, decoder, facts)) as ledger,
        ):
            _answer(options, crew, ledger, source, columns, decoder)
        write_files(ledger, source, folder)
        _say_what_is_there(ledger, source, folder)


def describe(
    options: Options,
    model: DiffusionModel,
    weights: str,
    decoder: Decoder,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """What decides a run's answers. facts: of the input."""
    from decode.decoders import qualified_name
    from decode.jobs import model_header

    return {
        **model_header(options, model, weights),
        "decoder": qualified_name(type(decoder)),
        "options": asdict(decoder),
        **facts,
        "column": options.column,
        "raw": options.raw,
    }


def _answer(
    options: Options,
    crew: Crew,
    ledger: BatchLedger,
    source: Source,
    columns: tuple[str, ...],
    decoder: Decoder,
) -> None:
    """Answer the rows that the ledger does not have."""
    from decode.workers import chunk_size

    if ledger.torn:
        say(f"notice: {ledger.path}: its last line was cut short and is decoded again")
    if ledger.rows:
        say(f"notice: {len(ledger.rows)} of {len(source)} rows are already in {ledger.path}")
    left = [number for number in range(len(source)) if number not in ledger.rows]
    work = partial(answer_rows, decoder=decoder, raw=options.raw, batch_size=options.batch_size)
    rows = ((number, asked(source, number, columns)) for number in left)
    size = chunk_size(options.batch_size, len(left), crew.count)
    ledger.start()
    with ShownProgress(standard_output(), "rows") as shown:
        shown.begin(len(left))
        for count, (_, answer) in enumerate(crew.spread(work, rows, size), 1):
            ledger.add(asdict(answer))
            shown.advance()
            if not shown.is_live and count * 10 // len(left) > (count - 1) * 10 // len(left):
                shown.say(f"{count} of {len(left)} rows")


def _say_what_is_there(ledger: BatchLedger, source: Source, folder: Path) -> None:

    bad = [answer for answer in ledger.done.values() if answer.error is not None]
    good = len(ledger.done) - len(bad)
    forwards = sum(answer.forwards for answer in ledger.done.values())
    print(f"{folder / answers_name(source)}: {good} rows answered in {forwards} forwards")
    if bad:
        first = min(bad, key=lambda answer: answer.row)
        say(
            f"notice: {len(bad)} rows could not be answered, {folder / BAD} says why; of the first:"
        )
        say(f"notice: {source.where(first.row)}: {one_line(first.error or '')}")
    if not good:
        raise InputError(f"none of the {len(bad)} rows could be answered")


@command(interrupted="interrupted; what is answered stays, the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    with quiet(options.verbose):
        if not followed(options):
            run(options)


# The rows of a batch job: what each asks, and what a model answers.

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


# The ledger of a batch job: its run, then a line a row as it is answered.
#
# {"run": {"model": "tiny-d2f", "input": "5d41...", "rows": 3}}
# {"row": 1, "text": "7", "tokens": [23, 8], "forwards": 2, ...}
# {"row": 0, "error": "expected prompt, got the keys promt"}

_ANSWER = TypeAdapter(Answer)


class BatchLedger(Ledger):
    """The rows that are answered. In memory are their counts alone, not what they say."""

    def __init__(self, path: Path, run: dict[str, Any]):
        super().__init__(path, run, key="row", fields=("row", "forwards", "error"))

    @property
    def done(self) -> dict[int, Answer]:
        return {key: Answer(**row) for key, row in self.rows.items()}

    def answers(self) -> Iterator[Answer]:
        """Every answer, whole, in the order of the rows."""
        lines = JsonLines(Path(self.path))
        # The first line is the run's.
        places = {lines.record(place)["row"]: place for place in range(1, len(lines))}
        for row in sorted(places):
            yield _ANSWER.validate_json(json.dumps(lines.record(places[row])))


# The files that a batch job leaves, written when every row has been looked at:
#
# rows {"id": "a", "prompt": "2 + 3"}     ->  answers.jsonl  {"id": "a", "prompt": "2 + 3",
#      {"id": "b", "promt": "2 + 4"}              "row": 0, "text": "5", "tokens": [12], ...}
#                                             bad.jsonl      {"row": 1, "where": "sums.jsonl, line
# 2",
#                                                             "error": "expected ...", "input":
# {...}}

LEDGER, BAD = "ledger.jsonl", "bad.jsonl"
_CHUNK = 1000  # rows


def answers_name(source: Source) -> str:
    """Of the kind that the rows came in; a data set's are parquet, which is one to those who load
    it."""
    return "answers.parquet" if isinstance(source, Table) else "answers.jsonl"


def check_names(source: Source) -> None:
    """Raise InputError where a table's columns cannot stand beside ours."""
    if isinstance(source, Table):
        try:
            renamed(source.columns)
        except BadRecord as error:
            raise InputError(f"{source.name}: {error}") from error


def check_free(source: Source, folder: Path) -> None:
    """Raise InputError where a file of another command, perhaps the input itself, is in the place
    of one of ours, which are there with their ledger alone."""
    for name in (answers_name(source), BAD):
        if (folder / name).exists() and not (folder / LEDGER).exists():
            raise InputError(
                f"{folder / name} exists and is not of this command; nothing was written, give "
                "another --output"
            )


def write_files(ledger: BatchLedger, source: Source, folder: Path) -> None:
    """Write the answers in the order of the rows, and the bad rows. Raises OutputError."""
    good = (answer for answer in ledger.answers() if answer.error is None)
    if isinstance(source, Table):
        _write_parquet(good, source, folder / answers_name(source))
    else:
        _write_lines((_line(answer, source) for answer in good), folder / answers_name(source))
    bad = (answer for answer in ledger.answers() if answer.error is not None)
    _write_lines((_bad_line(answer, source) for answer in bad), folder / BAD)


def _line(answer: Answer, source: Source) -> str:
    row = source.record(answer.row)
    own = dict(zip(renamed(list(row)), row.values(), strict=True))
    return json_line(_of_json(own) | _fields(answer))


def _of_json(value: Any) -> Any:
    """The same, with None for the numbers that JSON has not: NaN, and what is read as infinite."""
    if isinstance(value, dict):
        return {key: _of_json(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_of_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _fields(answer: Answer) -> dict[str, Any]:
    values = asdict(answer)
    return {name: values[name] for name in FIELDS}


def _bad_line(answer: Answer, source: Source) -> str:
    row = source.attempt(answer.row)
    values = {"row": answer.row, "where": source.where(answer.row), "error": answer.error}
    return (
        json.dumps(
            values | ({} if isinstance(row, BadRecord) else {"input": _of_json(row)}), default=str
        )
        + "\n"
    )


def _write_lines(lines: Iterable[str], path: Path) -> None:
    with writing(path) as file:
        for line in lines:
            file.write(line.encode())


def _write_parquet(answers: Iterator[Answer], source: Table, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ours = pa.schema(
        [
            ("row", pa.int64()),
            ("text", pa.string()),
            ("tokens", pa.list_(pa.int32())),
            ("forwards", pa.int32()),
            ("finish_reason", pa.string()),
            ("seed", pa.uint64()),
        ]
    )

    def joined(some: Sequence[Answer]) -> Any:
        table = source.arrow([answer.row for answer in some])
        table = table.rename_columns(renamed(table.column_names))
        for name, column in zip(
            FIELDS, pa.Table.from_pylist([_fields(a) for a in some], ours).columns, strict=True
        ):
            table = table.append_column(ours.field(name), column)
        return table

    with writing(path) as file:
        first = joined(list(islice(answers, _CHUNK)))
        with pq.ParquetWriter(file, first.schema) as writer:
            writer.write_table(first)
            while some := list(islice(answers, _CHUNK)):
                writer.write_table(joined(some))


if __name__ == "__main__":
    sys.exit(main())
