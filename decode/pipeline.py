"""python -m decode.pipeline --tau-add 0.1

Decodes held-out problems or prompts with a D2F model, shows the pipeline live, and says how right
and how fast it was. `--help` lists the options; the parts are in decode/commands.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from d2f.errors import InputError
from d2f.quiet import quiet
from decode.cli import command, followed, parse, say
from decode.display import is_live, standard_output
from decode.ledger import check_place, refuse_early

if TYPE_CHECKING:
    from rich.console import Console

    from d2f.model import DiffusionModel
    from decode.display import Silent
    from decode.jobs import Output, PromptJob, Record


@command(interrupted="interrupted; an --output keeps its lines, the same command goes on")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status. console: where to show it, by default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console)


def run(options: argparse.Namespace, console: Console | None = None) -> None:
    """Decode what the options say. Raises InputError before any work, RankError."""
    if followed(options):
        return
    _check_paths(options)
    if options.output is not None:
        check_place(Path(options.output))
    _run(options, console or standard_output())


def _run(options: argparse.Namespace, console: Console) -> None:
    with _waiting(options, console):
        from decode.cli import check_options, load, outline, read_settings
        from decode.jobs import (
            Output,
            Trace,
            give_notices,
            header,
            known_lengths,
            make_jobs,
            read_sources,
            refuse_equal_samples,
        )
        from decode.loop import decode
        from decode.workers import OneWorker

        settings = read_settings(options)
        sources = read_sources(options)
        # From the cheapest check to the dearest: flags, files, the model's shape, then its weights.
        settings.check(known_lengths(sources, settings))
        check_options(options)
        # Made before the model is loaded: it refuses a place that cannot be written.
        trace = Trace(options.trace) if options.trace is not None else None
        shape = outline(options.model, options.adapter, options.family, options.tensor_parallel)
        jobs = make_jobs(shape, sources, settings, raw=options.raw, n=options.n)
        refuse_equal_samples("--n", options.n, jobs)
        if options.output is not None:
            refuse_early(options.output, header(options, shape, "", jobs))
        model, weights = load(options)
        settled = header(options, model, weights, jobs)
        output = None
        if options.output is not None:
            output = Output(options.output, settled)
    give_notices(dict.fromkeys(s.task for s in sources if s.task is not None))
    _give_notices(options, model, jobs, output)
    done = dict(output.done) if output is not None else {}
    # Results that --output has from an earlier run of the same settings are not decoded again.
    pending = [job for job in jobs if job.source.id not in done]
    with output or nullcontext():
        new, seconds = decode(
            OneWorker(model),
            pending,
            batch_size=options.batch_size,
            display=_display(options, console, model, len(pending)),
            output=output,
            trace=trace,
        )
    order = {job.source.id: place for place, job in enumerate(jobs)}
    records = sorted([*done.values(), *new], key=lambda record: order[record.id])
    _report(options, console, model, records, new, seconds)
    if trace is not None and new:
        trace.write(settled)


def _give_notices(
    options: argparse.Namespace, model: DiffusionModel, jobs: list[PromptJob], output: Output | None
) -> None:
    """What the user should know before it starts, on standard error."""
    from decode.report import doubt_of

    notice = doubt_of(model, jobs[0].decoder)
    if notice is not None:
        say(f"notice: {notice}")
    if output is None:
        return
    if output.torn:
        say(f"notice: {output.path}: its last line was cut short and is decoded again")
    if output.done:
        say(f"notice: {len(output.done)} of {len(jobs)} prompts are already in {output.path}")
        if options.trace is not None:
            say("notice: they will not be in the trace")


def _report(
    options: argparse.Namespace,
    console: Console,
    model: DiffusionModel,
    records: list[Record],
    new: list[Record],
    seconds: float,
) -> None:
    """The totals and what was counted; for a quiet single prompt its response instead. new,
    seconds: the records of this run, not of the one that it goes on from, and its decoding."""

    from decode.jobs import short_dtype, shown_text, totals
    from decode.loop import WARM_UP_FORWARDS

    if options.prompt is not None and options.quiet:
        for record in records:
            print(shown_text(record), file=console.file)
        return
    lines = totals(records, batch_size=options.batch_size)
    if options.batch_size > 1 and new:
        tokens = sum(len(record.tokens) for record in new)
        lines.append(
            f"together: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"
        )
    threads = f", {model.threads} threads" if model.device.type == "cpu" else ""
    lines.append(
        "counted: visible tokens, up to the end token; seconds of decoding alone, after an untimed "
        f"warm-up of {WARM_UP_FORWARDS} forwards; batch {options.batch_size}; {options.model}, "
        f"{short_dtype(model)}, {model.device}{threads}{', compiled' * model.is_compiled}"
    )
    for line in lines:
        print(line, file=console.file)


def _display(
    options: argparse.Namespace, console: Console, model: DiffusionModel, total: int
) -> Silent:
    from decode.display import LiveDisplay, Plain, Silent

    if options.quiet:
        return Silent()
    if not is_live(console):
        return Plain(console)
    # Several prompts at once would each wait for the others' pauses.
    pause = options.pause if options.batch_size == 1 else 0.0
    return LiveDisplay(console, model.tokenizer, model.end_ids, total=total, pause=pause)


def _waiting(options: argparse.Namespace, console: Console) -> AbstractContextManager[object]:
    """Says in a terminal that the model is being loaded."""
    if options.quiet or not is_live(console):
        return nullcontext()
    from rich.text import Text

    return console.status(Text(f"loading {options.model}"))


def _check_paths(options: argparse.Namespace) -> None:
    """Raise InputError where two options name one file."""
    seen: dict[str, str] = {}
    for name in ("config", "prompts_file", "output", "trace"):
        value = getattr(options, name)
        if value is None or value == "-":
            continue
        flag, place = "--" + name.replace("_", "-"), os.path.realpath(value)
        if place in seen:
            raise InputError(f"{seen[place]} and {flag} are the same file, {value}")
        seen[place] = flag


if __name__ == "__main__":
    sys.exit(main())
