"""Decode held-out problems or prompts, and show the pipeline live: d2f decode."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.text import Text
from tyro.conf import arg

from d2f import flags as command_line
from d2f.command import command, say
from d2f.contract import Contract
from d2f.errors import InputError
from d2f.files import write_beside
from d2f.flags import Switch, check_least
from d2f.models import resolve
from d2f.quiet import quiet
from decode.cli import (
    BatchOptions,
    DecoderOptions,
    ModelOptions,
    TaskOptions,
    check_samples,
    checked_outline,
    followed,
    load,
    read_settings,
)
from decode.decoders import DECODERS, Decoder
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS
from decode.display import Display, LiveDisplay, Plain, is_live, standard_output
from decode.jobs import (
    Job,
    Record,
    Source,
    draw_problems,
    give_notices,
    header,
    make_jobs,
    read_prompts,
    task_sources,
)
from decode.ledger import Ledger, check_place, refuse_early
from decode.loop import WARM_UP_FORWARDS, Decoded, decode_jobs
from decode.report import doubt_of, empty_notice
from decode.step import Event
from decode.workers import OneWorker

if TYPE_CHECKING:
    from d2f.model import DiffusionModel

DEFAULT_PROBLEMS = 2


@dataclass(kw_only=True)
class PromptOptions:
    """Choose prompts; held-out problems by default."""

    prompt: Annotated[str | None, arg(metavar="TEXT")] = None
    """a user's message, through the chat template"""
    prompts_file: Annotated[str | None, arg(metavar="FILE")] = None
    """JSONL or - (standard input): prompt, messages or ids, and perhaps an id"""
    raw: Switch = False
    """take text as it is, without the chat template"""
    problems: Annotated[int | None, arg(metavar="N")] = None
    """held-out problems a task (default: 2)"""
    n: Annotated[int, arg(metavar="N")] = 1
    """answers a prompt, by different seeds"""

    def check(self) -> None:
        """Raise InputError for flags that do not go together."""
        own = self.prompt is not None or self.prompts_file is not None
        if self.prompt is not None and self.prompts_file is not None:
            raise InputError("--prompt and --prompts-file exclude each other: expected one")
        for name in ("tasks", "data", "data-files", "problems"):
            if own and getattr(self, name.replace("-", "_")) is not None:
                raise InputError(f"--{name} is for held-out problems, not for prompts of your own")
        if self.raw and not own:
            raise InputError("--raw needs --prompt or --prompts-file")
        if self.prompt == "":
            raise InputError("--prompt is empty: expected at least one token")
        check_least(self, problems=1)
        check_samples("--n", self.n)


@dataclass(kw_only=True)
class OutputOptions(BatchOptions):
    """Run it, and show or write results."""

    batch_size: Annotated[int, arg(metavar="N")] = 1
    """prompts decoded together"""
    output: Annotated[str | None, arg(metavar="FILE")] = None
    """JSONL of the results; the same command again goes on where it stopped"""
    trace: Annotated[str | None, arg(metavar="FILE")] = None
    """JSON of every forward: rows, blocks, confidences"""
    pause: Annotated[float | None, arg(metavar="SECONDS")] = None
    """that a terminal shows each forward (default: 0.05, at most 3 in all)"""
    quiet: Switch = False
    """only the totals; with --prompt only the response"""
    json: Switch = False
    """print results alone, as lines of JSON"""

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        super().check()
        if self.pause is not None and not 0 <= self.pause <= 60:
            raise InputError(f"--pause must lie in [0, 60] seconds, got {self.pause}")


@dataclass(kw_only=True)
class Options(ModelOptions, PromptOptions, TaskOptions, DecoderOptions, OutputOptions):
    """Decode prompts or held-out problems, and show the blocks live in a terminal.

    Prints whether an answer is right, visible tokens per second, forwards (calls of the model) and
    tokens per forward. A bundled model decodes by default the tasks that it has mostly right. Exit
    status: 0 done; 1 NaN or infinite logits; 2 bad input, found before any work; 130 interrupted.
    """

    examples = (
        "d2f decode --prompt 'Use 3, 5 and 27 to make 12.' --tau-conf 0.8",
        "d2f decode --tasks sudoku --problems 100 --batch-size 16 --output sudoku.jsonl",
    )


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Read the command line. Raises InputError, SystemExit after --help."""
    return command_line.parse(Options, arguments, usual="python -m decode.pipeline")


@command(interrupted="interrupted; an --output keeps its lines, the same command goes on")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command and return its exit status. console: default standard output."""
    options = parse(arguments)
    with quiet(options.verbose):
        run(options, console or standard_output())


def run(options: Options, console: Console) -> None:
    """Decode what the options say. Raises InputError before any work, RankError."""
    # From the cheapest check to the dearest: flags, files, the model's shape, then its weights.
    settings = read_settings(options)
    for flag, place in (("--output", options.output), ("--trace", options.trace)):
        if place is not None:
            check_place(Path(os.path.realpath(place)), flag)
    sources = read_sources(options)
    lengths = (s.task.response_length if s.task else DEFAULT_MAX_NEW_TOKENS for s in sources)
    settings.check(lengths, options)
    if followed(options):
        return
    live = is_live(console) and not (options.quiet or options.json)
    with ExitStack() as stack:
        with console.status(Text(f"loading {options.model}")) if live else nullcontext():
            shape = checked_outline(options)
            jobs = make_jobs(shape, sources, settings, raw=options.raw, samples=("--n", options.n))
            if options.output is not None:
                refuse_early(options.output, header(options, shape, "", jobs))
            model, weights = load(options)
        run = header(options, model, weights, jobs)
        ledger = None
        if options.output is not None:
            ledger = stack.enter_context(Ledger(options.output, run))
        give_notices(dict.fromkeys(source.task for source in sources if source.task is not None))
        if (doubt := doubt_of(model, jobs[0].decoder)) is not None:
            say(f"notice: {doubt}")
        if ledger is not None:
            ledger.say_what_is_there(len(jobs), "prompts")
        shown: list[Display] = []
        if live:
            # Several prompts at once would each wait for the others' pauses.
            pause = options.pause if options.batch_size == 1 else 0.0
            shown.append(LiveDisplay(console, model.tokenizer, model.end_ids, pause=pause))
        elif not (options.quiet or options.json):
            shown.append(Plain(console))
        trace = None if options.trace is None else Trace(options.trace)
        decoded = decode_jobs(
            OneWorker(model),
            jobs,
            batch_size=options.batch_size,
            max_rows=options.max_rows,
            ledger=ledger,
            displays=shown if trace is None else [trace, *shown],
        )
    known = held_out(options.adapter or options.model, jobs[0].decoder, model.contract)
    _report(options, console, model, decoded, known)
    if trace is not None and decoded.new:
        trace.write(run)


def read_sources(options: Options) -> list[Source]:
    """Read the prompts or draw the held-out problems of a command line. Raises InputError."""
    if options.prompt is not None:
        return [Source("prompt", "--prompt", options.prompt)]
    if options.prompts_file is not None:
        return read_prompts(options.prompts_file)
    count = DEFAULT_PROBLEMS if options.problems is None else options.problems
    if options.tasks is None and options.data is None:
        options.tasks = ",".join(mostly_right(options.adapter or options.model)) or None
    return [
        source
        for task in options.chosen
        for source in task_sources(task, draw_problems(task, "heldout", count))
    ]


# What was measured of the bundled models lies beside them.


def measured(model: str) -> list[dict[str, Any]]:
    """Read the held-out measurements of a bundled model, one for each decoder; else none."""
    path = Path(resolve(model)) / "evaluation.json"
    bundled = resolve(model) != model and path.is_file()
    return json.loads(path.read_text(encoding="utf-8")) if bundled else []


def mostly_right(model: str) -> list[str]:
    """Name the tasks of which a bundled model has most problems right with some decoder."""
    rows = [row for report in measured(model) for row in report["rows"]]
    return list(dict.fromkeys(row["task"] for row in rows if row["accuracy"] > 0.5))


def held_out(model: str, decoder: Decoder, contract: Contract) -> dict[str, str]:
    """Say by task how much of it a bundled model has right with this decoder, where measured."""
    found = {}
    for report in measured(model):
        kind = DECODERS[report["decoder"]]
        settings = kind.with_model_defaults(report["settings"], contract)
        if kind(**settings | {"max_new_tokens": decoder.max_new_tokens}) == decoder:
            for row in report["rows"]:
                share = f"{row['accuracy']:.1%} of {row['problems']} held-out problems right"
                found[row["task"]] = f"  (measured: {share})"
    return found


class Trace(Display):
    """Collect events and write them at the end; meant for a few prompts, it is kept in memory.

    The file: ``run`` (the settings) and ``requests``, each with id, prompt (ids), tokens, and
    ``forwards``: rows fed, rows already cached, blocks (response positions ``[start, end)``, state,
    tokens, null where masked) and what was revealed (position, token, confidence).
    """

    def __init__(self, path: str):
        self.path = Path(os.path.realpath(path))
        self._requests: dict[int | str, dict[str, Any]] = {}

    def show(self, job: Job, event: Event) -> None:
        name, result = job.source.id, event.result
        entry = self._requests.setdefault(name, {"id": name, "prompt": job.ids, "forwards": []})
        entry["forwards"].append(
            {
                "forward": event.forward,
                "blocks": [asdict(block) for block in event.blocks],
                "revealed": [asdict(revealed) for revealed in event.revealed],
            }
        )
        if result is not None:
            for forward, (fed, cached) in zip(entry["forwards"], result.calls, strict=True):
                forward |= {"fed": fed, "cached": cached}
            for key in ("tokens", "raw_tokens", "finish_reason"):
                entry[key] = getattr(result, key)

    def write(self, run: dict[str, Any]) -> None:
        """Write the file, whole or not at all."""
        content = {"run": run, "requests": list(self._requests.values())}
        write_beside(self.path, json.dumps(content) + "\n")


def _report(
    options: Options,
    console: Console,
    model: DiffusionModel,
    decoded: Decoded,
    known: Mapping[str, str],
) -> None:
    """Print the totals and what was counted; for a quiet single prompt its response instead.
    known: what else is known of a task, behind its totals."""
    empty = [record for record in decoded.new if not record.tokens]
    longest = max((record.max_new_tokens for record in empty), default=0)
    if (notice := empty_notice(model, len(empty), longest)) is not None:
        say(f"notice: {notice}")
    if options.json or (options.prompt is not None and options.quiet):
        for record in decoded.records:
            line = json.dumps(asdict(record)) if options.json else record.shown
            print(line, file=console.file)
        return
    threads = f", {model.threads} threads" if model.device.type == "cpu" else ""
    counted = (
        "counted: visible tokens, up to the end token; seconds of decoding alone, after an untimed "
        f"warm-up of {WARM_UP_FORWARDS} forwards; batch {options.batch_size}; {options.model}, "
        f"{model.precision}, {model.device}{threads}{', compiled' * model.is_compiled}"
    )
    for line in (*totals(decoded, known, batch_size=options.batch_size), counted):
        console.print(Text(line), soft_wrap=not console.is_terminal)


def totals(decoded: Decoded, known: Mapping[str, str], *, batch_size: int) -> Iterator[str]:
    """Yield a line for each task: right k of n, tokens/s, tokens/forward, what else is known; and
    for a batch one."""
    groups: dict[str, list[Record]] = {}
    for record in decoded.records:
        groups.setdefault(record.task or "prompts", []).append(record)
    for group, part in groups.items():
        tokens, forwards, seconds = (
            sum(values)
            for values in zip(*((len(r.tokens), r.forwards, r.seconds) for r in part), strict=True)
        )
        judged = [record.right for record in part if record.right is not None]
        what = f"right {sum(judged)} of {len(judged)}" if judged else f"{len(part)} decoded"
        # In a batch the seconds of requests overlap, so this is what each of them had.
        speed = f"{tokens / seconds:.1f} tokens/s{' a prompt' * (batch_size > 1)}"
        rate = f"{tokens / forwards:.2f} tokens/forward"
        yield f"{group:<10} {what:<16} {speed}  {rate}{known.get(group, '')}"
    if batch_size > 1 and decoded.new:
        tokens, seconds = sum(len(record.tokens) for record in decoded.new), decoded.seconds
        yield f"together: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:.1f} tokens/s"


if __name__ == "__main__":
    sys.exit(main())
