"""Show what the model of a training run will see: d2f data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from rich.console import Console
from rich.text import Text
from tyro.conf import arg

from d2f.command import command
from d2f.errors import InputError
from d2f.flags import Switch, Verbose, check_least, parse_known
from d2f.quiet import quiet

if TYPE_CHECKING:
    from distill.data.samples import Sample
    from distill.data.stream import Plan, Stream
    from distill.objectives.base import Objective


@dataclass(kw_only=True)
class Options:
    """Print what the model of a training run will see: some samples with their tokens by mask state
    and their block borders, the mask ratio of each block, lengths, how many rows were dropped or
    cut, and what a step and an epoch hold. Of recorded trajectories it shows the states, with the
    tokens that the decoder decided next. Colours on a terminal; elsewhere [masked], [+decided next]
    and {tail}.

    Every key of the configuration can be overridden: --data.row_length 512
    """

    inspect: Switch = False
    """show samples; must be given"""
    config: Annotated[str, arg(metavar="NAME")]
    """YAML file, or a name of training in `d2f configs`"""
    samples: Annotated[int, arg(metavar="N")] = 3
    """samples to show"""
    verbose: Verbose = False

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, samples=1)
        if not self.inspect:
            raise InputError("expected --inspect, which is all that this command does")


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, list[str]]:
    """Read the command line: its options, and the overrides of the configuration."""
    return parse_known(Options, arguments, usual="python -m distill.data")


def inspect(options: Options, overrides: Sequence[str], console: Console | None = None) -> None:
    """Show what the options ask for. Raises InputError."""
    from rich.console import Console

    from distill.config import read_config
    from distill.export import prepare_model
    from distill.objectives import OBJECTIVES

    config = read_config(options.config, overrides)
    model = prepare_model(config, "meta")  # no weights are needed to look
    objective = OBJECTIVES[config.objective.name](model, config)
    show(console or Console(), objective.stream(), objective, options.samples)


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command; its exit status."""
    options, overrides = parse(arguments)
    with quiet(options.verbose):
        inspect(options, overrides, console)


# What a token is to the model: its style on a terminal, and the marks around it elsewhere.
PROMPT, VISIBLE, MASKED, TAIL, MASKED_TAIL = "prompt", "visible", "masked", "tail", "masked tail"
NEXT = "decided next"  # masked, in a state of a trajectory
LOOKS = {
    PROMPT: ("dim", "", ""),
    VISIBLE: ("green", "", ""),
    MASKED: ("bold white on red", "[", "]"),
    TAIL: ("cyan", "{", "}"),
    MASKED_TAIL: ("white on magenta", "[{", "}]"),
    NEXT: ("bold black on yellow", "[+", "]"),
}
BORDER = "|"
END = "·"  # an end token of the tail


@dataclass(frozen=True)
class View:
    """A sample with the mask that its noise drew.

    states: of each token, prompt first. starts: where blocks of the response begin, counted from
    the response's first token; masked: bool ``[response]``.
    """

    sample: Sample
    where: str
    states: list[str]
    starts: list[int]
    masked: np.ndarray

    @property
    def blocks(self) -> Iterator[tuple[int, int]]:
        """(tokens, masked ones) of each block."""
        ends = [*self.starts[1:], len(self.sample.response)]
        for start, end in zip(self.starts, ends, strict=True):
            yield end - start, int(self.masked[start:end].sum())


def view(sample: Sample, objective: Objective, where: str) -> View:
    """Mask a sample as the objective does."""
    masked, _ = objective.draw(sample)
    following = getattr(sample, "now", np.zeros(len(masked), dtype=bool))  # of a trajectory's state
    states = [PROMPT] * len(sample.prompt)
    for place, hidden in enumerate(masked):
        tail = place >= sample.answer
        if following[place]:
            states.append(NEXT)
        elif hidden:
            states.append(MASKED_TAIL if tail else MASKED)
        else:
            states.append(TAIL if tail else VISIBLE)
    return View(sample, where, states, block_starts(sample, objective), masked)


def block_starts(sample: Sample, objective: Objective) -> list[int]:
    """Return where blocks begin, counted from the response's first token: where what a token sees
    grows. One block where all see the same, or each sees one more than the one before."""
    from d2f.spans import causal

    spans = objective.sample_spans(sample)
    length, prompt = len(sample.response), len(sample.prompt)
    # WeDLM feeds a sample twice: its spans are not one range a token.
    if spans.shape[:2] != (len(sample), 1) or spans.equal(causal(len(sample))):
        return [0]
    # Under a block-causal mask all tokens of a block see up to its end.
    ends = spans[prompt:, 0, 1].numpy()
    return [0, *(i for i in range(1, length) if ends[i] != ends[i - 1])]


def show(console: Console, stream: Stream, objective: Objective, samples: int) -> None:
    """Print the first samples of a stream, what was left out, and what a step holds."""
    from distill.data.stream import plan

    marks = not console.is_terminal or console.no_color
    legend = Text("legend: ")
    for name in LOOKS:
        legend.append_text(_token(name, name, marks)).append(" ")
    console.print(
        legend.append(f"{BORDER} block border, {END} end token of the tail"), soft_wrap=True
    )
    index = shown = 0
    while shown < samples:
        sample = stream.sample(index)
        if sample is not None:
            seen = view(sample, objective, stream.where(index))
            _show(console, seen, objective, marks)
            shown += 1
        index += 1
    console.print()
    for line in describe(plan(stream), stream.report()):
        _line(console, line)
    if stream.held_out is not None:
        _line(console, f"held-out loss: {stream.held_out.said}")


def describe(found: Plan, report: str | None) -> Iterator[str]:
    """Say what was left out and what a step and an epoch hold, line by line."""
    if report is not None:
        yield f"data: {report}"
    yield (
        f"a step: {found.samples_per_step:.1f} samples, {found.tokens_per_step:.0f} tokens in "
        f"{found.places_per_step} places ({found.filled:.0%}), "
        f"{found.response_tokens_per_step:.0f} of them in responses "
        f"(mean of {found.steps} steps)"
    )
    if found.steps_per_epoch is None:
        yield "an epoch: none, generated tasks never repeat"
    else:
        about = "" if found.is_exact else "about "
        yield (
            f"an epoch: {found.samples_per_epoch} samples, {about}{found.steps_per_epoch:.1f} steps"
        )


def _show(console: Console, seen: View, objective: Objective, marks: bool) -> None:
    sample, tokenizer = seen.sample, objective.model.tokenizer
    assert tokenizer is not None
    tail = len(sample.response) - sample.answer
    console.print()
    _line(
        console,
        f"sample {sample.index} ({seen.where}): prompt {len(sample.prompt)} tokens, response "
        f"{len(sample.response)} ({sample.answer} answer, {tail} tail), {len(sample)} of the "
        f"{objective.config.data.row_length} of a row",
    )
    text = Text()
    starts = {len(sample.prompt) + start for start in seen.starts}
    for place, token in enumerate(sample.prompt + sample.response):
        if place in starts:
            text.append(BORDER, style="bold yellow")
        state = seen.states[place]
        word = str(tokenizer.decode([token])).replace("\n", "⏎\n")
        is_tail = place >= len(sample.prompt) + sample.answer
        text.append_text(_token(END if is_tail else word, state, marks))
    console.print(text, soft_wrap=True)
    blocks = [f"{hidden}/{tokens}={hidden / tokens:.2f}" for tokens, hidden in seen.blocks]
    _line(console, f"masked by block: {' '.join(blocks)}")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _token(word: str, state: str, marks: bool) -> Text:
    """Write a token in its state's style, between its marks where colours do not show."""
    style, left, right = LOOKS[state]
    return Text(f"{left}{word}{right}" if marks else word, style=style)


if __name__ == "__main__":
    sys.exit(main())
