"""python -m decode.batch prompts.jsonl answers --model tiny-d2f

Answers every row of a file or data set, with one model or many at a time. `--help` lists the
options. The folder of --output has a ledger of the answers as they come, and at the end::

    rows {"id": "a", "prompt": "2 + 3"}     ->  answers.jsonl  {"id": "a", "prompt": "2 + 3",
         {"id": "b", "promt": "2 + 4"}              "row": 0, "text": "5", "tokens": [12], ...}
                                                bad.jsonl      {"row": 1,
                                                    "where": "sums.jsonl, line 2",
                                                    "error": "expected ...", "input": {...}}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from d2f import flags as command_line
from d2f.command import command, say
from d2f.data import BadRecord, Source
from d2f.errors import InputError, one_line
from d2f.files import locked, writing
from d2f.flags import Switch
from d2f.quiet import quiet
from decode.cli import (
    BatchOptions,
    DecoderOptions,
    ModelOptions,
    WorkerOptions,
    checked_outline,
    followed,
    read_settings,
)
from decode.decoders import Decoder, qualified_name
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS
from decode.display import ShownProgress, standard_output
from decode.jobs import model_header
from decode.ledger import Ledger, check_folder, json_line, refuse_early
from decode.loop import EncodedPrompt, results
from decode.step import Result
from decode.workers import Crew, chunk_size, workers

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

COLUMNS = ("messages", "prompt", "question", "ids")
FIELDS = ("row", "text", "tokens", "forwards", "finish_reason", "seed")  # of an answer
INPUT = "input_"  # before a field of the input that has the name of one of ours
LEDGER, BAD = "ledger.jsonl", "bad.jsonl"
CHUNK = 1000  # rows of a parquet file that are written at a time


@dataclass(kw_only=True)
class InputOptions:
    """Rows to answer."""

    input: Positional[str]
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
class OutputOptions(BatchOptions):
    """Run it, and write results."""

    output: Positional[str]
    """folder for the answers; one of another run is refused"""


@dataclass(kw_only=True)
class Options(ModelOptions, InputOptions, DecoderOptions, OutputOptions, WorkerOptions):
    """Answer every row of a file or data set: a folder with one file of the input's kind, in its
    order, each row with its own fields and text, tokens, forwards and finish_reason.

    The same command again goes on where it stopped. docs/serving.md says what a row may be and what
    the folder holds.

    Exit status: 0 done; 2 bad input, found before any work, or no row could be answered; 130
    interrupted, what is answered stays and the same command goes on.
    """

    examples = (
        "d2f batch prompts.jsonl answers",
        "d2f batch openai/gsm8k answers --dataset-config main --split test --batch-size 64",
    )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m decode.batch")


class Rows(Source):
    """The rows of --input. Raises InputError."""

    def __init__(self, place: str, config: str | None, split: str | None, column: str | None):
        is_file = Path(place).is_file() or place.endswith((".jsonl", ".json", ".parquet"))
        if is_file and (config is not None or split is not None):
            raise InputError("--split and --dataset-config are for data sets, not for a file")
        super().__init__(place, is_file=is_file, config=config, split=split)
        self.asking: Sequence[str] = COLUMNS if column is None else [column]
        self.answers_name = "answers.jsonl"  # a file of the input's kind
        if self.columns is not None:
            self.answers_name = "answers.parquet"
            there = [name for name in self.asking if name in self.columns]
            if not there:
                raise InputError(
                    f"{self.name}: expected the column {' or '.join(self.asking)}, it has "
                    f"{', '.join(self.columns)}; --column names another"
                )
            self.asking = there
            self.select(there)

    def prompt(self, number: int) -> Any:
        """Return what a row asks. Raises BadRecord."""
        row = self.record(number)
        if not isinstance(row, dict):
            raise BadRecord(f"expected an object of columns, got {str(row)[:60]!r}")
        for name in self.asking:
            if row.get(name) is not None:
                return row[name]
        keys = ", ".join(f"{name} (null)" if value is None else name for name, value in row.items())
        raise BadRecord(f"expected {' or '.join(self.asking)}, got the keys {keys}")


def answer(row: int, result: Result) -> dict[str, Any]:
    """Make the ledger's line of a row, numbered from 0. Its tokens are the visible ids, cut before
    the end token or stop string; error says why there are none."""
    error = result.error
    return {
        "row": row,
        "text": result.text,
        "tokens": result.tokens,
        "forwards": result.forwards,
        "finish_reason": "" if error else result.finish_reason,
        "seed": 0 if error else result.seed,
        "error": None if error is None else f"{type(error).__name__}: {error}",
    }


def run(options: Options) -> None:
    """Answer what the options say. Raises InputError before any work, or where no row could be
    answered."""
    # Cheap checks come first: flags, rows, the model's shape, which run the folder is of.
    settings = read_settings(options)
    settings.check([DEFAULT_MAX_NEW_TOKENS], options)
    rows = Rows(options.input, options.dataset_config, options.split, options.column)
    shape = checked_outline(options)
    # Without a length where none was given: what the context leaves.
    decoder = settings.decoder(shape)
    decoder.check(shape.contract)
    facts = {"input": rows.digest, "rows": len(rows)}
    with locked(check_folder(options.output)) as folder:
        for name in (rows.answers_name, BAD):
            if (folder / name).exists() and not (folder / LEDGER).exists():
                raise InputError(
                    f"{folder / name} exists and is not of this command; nothing was written, give "
                    "another --output"
                )
        refuse_early(folder / LEDGER, describe(options, shape, "", decoder, facts), key="row")
        with workers(options) as crew:
            run = crew.ask(describe, decoder, facts)
            # In memory are counts alone, not what the answers say.
            kept = ("row", "forwards", "error")
            with Ledger(folder / LEDGER, run, key="row", fields=kept) as ledger:
                ledger.say_what_is_there(len(rows), "rows")
                _answer(options, crew, shape, ledger, rows, decoder)
        _write_files(rows, folder)
        _say_what_is_there(ledger, rows, folder)


def describe(
    options: Options, model: DiffusionModel, weights: str, decoder: Decoder, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return what decides a run's answers. facts: of the input."""
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
    shape: DiffusionModel,
    ledger: Ledger,
    rows: Rows,
    decoder: Decoder,
) -> None:
    """Answer the rows that the ledger does not have. At a temperature a row has a seed of its own,
    made of the decoder's and the row's number."""
    from decode.engine.prompts import checked

    left = [number for number in range(len(rows)) if number not in ledger.rows]
    ledger.start()
    with ShownProgress(standard_output(), "rows") as shown:
        shown.begin(len(left))

        def keep(line: dict[str, Any]) -> None:
            ledger.add(line)
            shown.advance()
            done = len(left) - (len(rows) - len(ledger.rows))
            if not shown.is_live and done * 10 // len(left) > (done - 1) * 10 // len(left):
                shown.say(f"{done} of {len(left)} rows")

        def items() -> Iterator[tuple[int, EncodedPrompt]]:
            for number in left:
                try:
                    prompt = rows.prompt(number)
                    ids, own = checked(shape, prompt, decoder, f"row {number}", raw=options.raw)
                except (BadRecord, InputError) as error:
                    said = one_line(str(error))[:400]
                    keep(answer(number, Result.failed(error)) | {"error": said})
                else:
                    yield number, (ids, own.sampled(number, 0))

        work = partial(results, batch_size=options.batch_size, max_rows=options.max_rows)
        size = chunk_size(options.batch_size, len(left), crew.count)
        for number, result in crew.map(work, items(), size):
            keep(answer(number, result))


# The files at the end.


def _write_files(rows: Rows, folder: Path) -> None:
    """Write the answers in the order of the rows, and the bad rows. Raises OutputError."""
    good = (line for line in _in_order(folder / LEDGER) if line["error"] is None)
    with writing(folder / rows.answers_name) as file:
        if rows.columns is not None:
            _write_parquet(good, rows, file)
        for line in good:
            row = rows.record(line["row"])
            own = dict(zip(renamed(row), row.values(), strict=True))
            file.write(json_line(own | {name: line[name] for name in FIELDS}).encode())
    with writing(folder / BAD) as file:
        for line in _in_order(folder / LEDGER):
            if line["error"] is not None:
                number = line["row"]
                said = {"row": number, "where": rows.where(number), "error": line["error"]}
                row = rows.attempt(number)
                if not isinstance(row, BadRecord):
                    said["input"] = row
                file.write(json.dumps(said, default=str).encode() + b"\n")


def renamed(names: Collection[str]) -> list[str]:
    """Name the input's fields beside ours."""
    found = []
    for name in names:
        if name in FIELDS:
            while (name := INPUT + name) in names:
                pass
        found.append(name)
    return found


def _in_order(ledger: Path) -> Iterator[dict[str, Any]]:
    """Yield the answers in the order of the rows; in memory is only where their lines begin."""
    with ledger.open("rb") as file:
        file.readline()  # the run's
        places = {}
        while line := file.readline():
            places[json.loads(line)["row"]] = file.tell() - len(line)
        for row in sorted(places):
            file.seek(places[row])
            yield json.loads(file.readline())


def _write_parquet(answers: Iterator[dict[str, Any]], rows: Rows, file: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = (
        pa.int64(), pa.string(), pa.list_(pa.int32()), pa.int32(), pa.string(), pa.uint64()
    )  # fmt: skip
    ours = pa.schema(list(zip(FIELDS, kinds, strict=True)))
    writer = None
    while (some := list(islice(answers, CHUNK))) or writer is None:
        table = rows.arrow([line["row"] for line in some])
        table = table.rename_columns(renamed(table.column_names))
        columns = pa.Table.from_pylist(some, ours)
        for name in FIELDS:
            table = table.append_column(ours.field(name), columns[name])
        writer = writer or pq.ParquetWriter(file, table.schema)
        writer.write_table(table)
    writer.close()


def _say_what_is_there(ledger: Ledger, rows: Rows, folder: Path) -> None:
    bad = sorted(number for number, row in ledger.rows.items() if row["error"] is not None)
    good = len(ledger.rows) - len(bad)
    forwards = sum(row["forwards"] for row in ledger.rows.values())
    print(f"{folder / rows.answers_name}: {good} rows answered in {forwards} forwards")
    if bad:
        why = one_line(ledger.rows[bad[0]]["error"])
        say(f"notice: {len(bad)} rows could not be answered, {folder / BAD} says why; the first:")
        say(f"notice: {rows.where(bad[0])}: {why}")
    if not good:
        raise InputError(f"none of the {len(bad)} rows could be answered")


@command(interrupted="interrupted; what is answered stays, the same command goes on")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    options = parse(arguments)
    with quiet(options.verbose):
        if not followed(options):
            run(options)


if __name__ == "__main__":
    sys.exit(main())
