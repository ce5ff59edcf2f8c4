"""python -m decode.batch --model tiny-d2f --input prompts.jsonl --output answers

Answers every row of a file or data set, with one model or many at a time. `--help` lists the
options, docs/batch.md says what comes out; the parts are in decode/batching.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError, one_line
from d2f.locks import locked
from d2f.quiet import quiet
from decode.batching.batch_flags import parse
from decode.commands.run_command import command, say
from decode.commands.several_ranks import followed
from decode.reporting.places import check_folder
from decode.reporting.shown_progress import ShownProgress, standard_output

if TYPE_CHECKING:
    from d2f.data_records import Source
    from d2f.model import DiffusionModel
    from decode.batching.batch_ledger import BatchLedger
    from decode.cluster.workers import Crew
    from decode.decoders import Decoder


def run(options: argparse.Namespace) -> None:
    """Answer what the options say. Raises InputError before any work, or where no row could be
    answered."""
    from decode.batching.batch_files import LEDGER, check_free, check_names, write_files
    from decode.batching.batch_ledger import BatchLedger
    from decode.batching.batch_rows import asked_columns, open_rows
    from decode.cluster.workers import workers
    from decode.commands.decoder_settings import read_settings
    from decode.commands.load_model import check_options, outline
    from decode.decoders.options import DEFAULT_MAX_NEW_TOKENS

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
        BatchLedger.refuse_early(folder / LEDGER, known)
        with workers(options) as crew:
            ledger = BatchLedger(folder / LEDGER, crew.ask(describe, decoder, facts))
            _answer(options, crew, ledger, source, columns, decoder)
        write_files(ledger, source, folder)
        _say_what_is_there(ledger, source, folder)


def describe(
    options: argparse.Namespace,
    model: DiffusionModel,
    weights: str,
    decoder: Decoder,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """What decides a run's answers. facts: of the input."""
    from decode.commands.run_header import model_header
    from decode.decoders import spelled

    return {
        **model_header(options, model, weights),
        "decoder": spelled(type(decoder)),
        "options": asdict(decoder),
        **facts,
        "column": options.column,
        "raw": options.raw,
    }


def _answer(
    options: argparse.Namespace,
    crew: Crew,
    ledger: BatchLedger,
    source: Source,
    columns: tuple[str, ...],
    decoder: Decoder,
) -> None:
    """Answer the rows that the ledger does not have."""
    from decode.batching.batch_rows import answer_rows, asked
    from decode.cluster.workers import chunk_size

    if ledger.torn:
        say(f"notice: {ledger.path}: its last line was cut short and is decoded again")
    if ledger.done:
        say(f"notice: {len(ledger.done)} of {len(source)} rows are already in {ledger.path}")
    left = [number for number in range(len(source)) if number not in ledger.done]
    work = partial(answer_rows, decoder=decoder, raw=options.raw, batch_size=options.batch_size)
    rows = ((number, asked(source, number, columns)) for number in left)
    size = chunk_size(options.batch_size, len(left), crew.count)
    ledger.start()
    with ShownProgress(standard_output(), "rows") as shown:
        shown.begin(len(left))
        for count, (_, answer) in enumerate(crew.spread(work, rows, size), 1):
            ledger.add(answer)
            shown.advance()
            if not shown.is_live and count * 10 // len(left) > (count - 1) * 10 // len(left):
                shown.say(f"{count} of {len(left)} rows")


def _say_what_is_there(ledger: BatchLedger, source: Source, folder: Path) -> None:
    from decode.batching.batch_files import BAD, answers_name

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


@command(
    interrupted="interrupted; what is answered stays, the same command goes on", goes_on_unread=True
)
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; the exit status."""
    options = parse(arguments)
    with quiet(options.verbose):
        if not followed(options):
            run(options)


if __name__ == "__main__":
    sys.exit(main())
