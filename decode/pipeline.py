"""python -m decode.pipeline --tau-add 0.1

Decodes held-out problems or prompts with a D2F model, shows the pipeline live, and says how right
and how fast it was. `--help` lists the options; the parts are in decode/commands.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from d2f.errors import InputError
from d2f.quiet import quiet
from decode import cli
from decode.cli import (
    DecoderOptions,
    ModelOptions,
    Switch,
    TaskOptions,
    check_least,
    check_samples,
    command,
    followed,
    say,
)

if TYPE_CHECKING:
    from rich.console import Console

    from d2f.model import DiffusionModel
    from decode.display import Silent
    from decode.jobs import Output, PromptJob, Record


@dataclass(kw_only=True)
class PromptOptions:
    """What to decode, by default held-out problems."""

    prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """one user message, through the tokenizer's chat template"""
    prompts_file: Annotated[str | None, arg(metavar="FILE")] = None
    """JSONL, - for standard input: a line has one of prompt (text), messages (role and content) or
    ids (token ids), and may have an id (default: its line number)"""
    raw: Switch = False
    """take text prompts as they are, without the chat template"""
    problems: Annotated[int | None, arg(metavar="N")] = None
    """held-out problems a task, at least 1 (default: 2)"""
    n: Annotated[int, arg(metavar="N")] = 1
    """answers a prompt, at least 1, each with a seed of its own; their ids are ID#1, ID#2, ..."""

    def check(self) -> None:
        """Raise InputError for flags that do not go together."""
        prompts = self.prompt is not None or self.prompts_file is not None
        if self.prompt is not None and self.prompts_file is not None:
            raise InputError("--prompt and --prompts-file exclude each other: expected one")
        for name in ("tasks", "data", "problems"):
            if prompts and getattr(self, name) is not None:
                raise InputError(f"--{name} is for held-out problems, not for prompts of your own")
        if self.raw and not prompts:
            raise InputError("--raw needs --prompt or --prompts-file")
        if self.prompt == "":
            raise InputError("--prompt is empty: expected at least one token")
        check_least(self, problems=1)
        check_samples("--n", self.n)


@dataclass(kw_only=True)
class OutputOptions:
    """How it runs, and what it writes."""

    batch_size: Annotated[int, arg(metavar="N")] = 1
    """prompts decoded together, at least 1; the tokens do not depend on it"""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """JSONL: the run's settings, then a line a result as it comes; the same command again goes on
    where it stopped"""
    trace: Annotated[str | None, arg(metavar="FILE")] = None
    """JSON of every forward: rows fed, block states, tokens, confidences"""
    pause: Annotated[float | None, arg(metavar="SECONDS")] = None
    """how long each forward stays on the screen, in a terminal and one prompt at a time; not
    counted in any time (default: 0.05 at first, then less and less, 3 seconds in all)"""
    quiet: Switch = False
    """only the totals; with --prompt only the response"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, batch_size=1)
        if self.pause is not None and not 0 <= self.pause <= 60:
            raise InputError(f"--pause must lie in [0, 60] seconds, got {self.pause}")


@dataclass(kw_only=True)
class Options(ModelOptions, PromptOptions, TaskOptions, DecoderOptions, OutputOptions):
    """Decode a few held-out problems with the bundled D2F model and show the pipeline live in a
    terminal: the state of each block, its tokens as they appear.

    For each problem it then says whether the answer is right, visible tokens per second, forwards
    (calls of the model) and tokens per forward. Where standard output is not a terminal it prints
    plain lines.

    Exit status: 0 done; 1 the model gave NaN or infinite logits; 2 bad input, found before any
    work, with nothing written; 130 interrupted, the output lines written so far stay.
    """


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return cli.parse(Options, arguments, usual="python -m decode.pipeline")


@command(interrupted="interrupted; an --output keeps its lines, the same command goes on")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status. console: where to show it, by default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console)


def run(options: Options, console: Console | None = None) -> None:
    """Decode what the options say. Raises InputError before any work, RankError."""
    if followed(options):
        return
    from decode.display import standard_output
    from decode.ledger import check_place

    _check_paths(options)
    if options.output is not None:
        check_place(Path(options.output))
    _run(options, console or standard_output())


def _run(options: Options, console: Console) -> None:
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
        from decode.ledger import refuse_early
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
    options: Options, model: DiffusionModel, jobs: list[PromptJob], output: Output | None
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
    options: Options,
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


def _display(options: Options, console: Console, model: DiffusionModel, total: int) -> Silent:
    from decode.display import LiveDisplay, Plain, Silent, is_live

    if options.quiet:
        return Silent()
    if not is_live(console):
        return Plain(console)
    # Several prompts at once would each wait for the others' pauses.
    pause = options.pause if options.batch_size == 1 else 0.0
    return LiveDisplay(console, model.tokenizer, model.end_ids, total=total, pause=pause)


def _waiting(options: Options, console: Console) -> AbstractContextManager[object]:
    """Says in a terminal that the model is being loaded."""
    from rich.text import Text

    from decode.display import is_live

    if options.quiet or not is_live(console):
        return nullcontext()

    return console.status(Text(f"loading {options.model}"))


def _check_paths(options: Options) -> None:
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
