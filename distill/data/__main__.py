"""Show what the model of a training run will see: d2f data."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
from rich.console import Console
from rich.text import Text
from tyro.conf import Positional, arg

from d2f.command import command
from d2f.flags import Switch, Verbose, check_least, parse_known
from d2f.quiet import quiet

if TYPE_CHECKING:
    from distill.data.samples import Sample
    from distill.data.stream import Plan
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

    examples = (
        "d2f data tiny-d2f",
        "d2f data my-training.yaml --samples 10 --data.row_length 512",
    )

    inspect: Switch = False
    """show samples, which is all that this command does"""
    config: Positional[str]
    """YAML file, or a name of training in `d2f configs`"""
    samples: Annotated[int, arg(metavar="N")] = 3
    """samples to show"""
    verbose: Verbose = False

    def check(self) -> None:
        """Raise InputError for a value out of range."""
        check_least(self, samples=1)


def parse(arguments: Sequence[str] | None = None) -> tuple[Options, list[str]]:
    """Read the command line: its options, and the overrides of the configuration."""
    return parse_known(Options, arguments, usual="python -m distill.data")


@command(interrupted="interrupted")
def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> None:
    """Run the command and return its exit status."""
    options, overrides = parse(arguments)
    with quiet(options.verbose):
        from distill.config import read_config
        from distill.export import prepare_model
        from distill.objectives import OBJECTIVES

        config = read_config(options.config, overrides)
        model = prepare_model(config, "meta")  # no weights are needed to look
        objective = OBJECTIVES[config.objective.name](model, config)
        show(console or Console(), objective, options.samples)


# The state of a token for the model: its style on a terminal, and the marks around it elsewhere.
LOOKS = {
    "prompt": ("dim", "", ""),
    "visible": ("green", "", ""),
    "masked": ("bold white on red", "[", "]"),
    "tail": ("cyan", "{", "}"),
    "masked tail": ("white on magenta", "[{", "}]"),
    "decided next": ("bold black on yellow", "[+", "]"),  # masked, in a state of a trajectory
}
BORDER = "|"
END = "·"  # an end token of the tail


def show(console: Console, objective: Objective, samples: int) -> None:
    """Print the first samples of a run, what was left out, and what a step holds."""
    from distill.data.stream import plan

    marks = not console.is_terminal or console.no_color
    stream = objective.stream()
    legend = Text("legend: ")
    for state in LOOKS:
        legend.append_text(_token(state, state, marks)).append(" ")
    console.print(
        legend.append(f"{BORDER} block border, {END} end token of the tail"), soft_wrap=True
    )
    index = shown = 0
    while shown < samples:
        sample = stream.sample(index)
        if sample is not None:
            _show(console, sample, stream.where(index), objective, marks)
            shown += 1
        index += 1
    console.print()
    lines = describe(plan(stream), stream.report())
    if stream.held_out is not None:
        lines.append(f"held-out loss: {stream.held_out.said}")
    for line in lines:
        _line(console, line)


def describe(found: Plan, report: str | None) -> list[str]:
    """Say what was left out and what a step and an epoch hold, line by line."""
    lines = [] if report is None else [f"data: {report}"]
    lines.append(
        f"a step: {found.samples_per_step:.1f} samples, {found.tokens_per_step:.0f} tokens in "
        f"{found.places_per_step} places ({found.filled:.0%}), "
        f"{found.response_tokens_per_step:.0f} of them in responses "
        f"(mean of {found.steps} steps)"
    )
    if found.steps_per_epoch is None:
        return [*lines, "an epoch: none, generated tasks never repeat"]
    steps = f"{'' if found.is_exact else 'about '}{found.steps_per_epoch:.1f} steps"
    return [*lines, f"an epoch: {found.samples_per_epoch} samples, {steps}"]


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


def _show(console: Console, sample: Sample, where: str, objective: Objective, marks: bool) -> None:
    """Print a sample as the objective masks it."""
    tokenizer, prompt = objective.model.tokenizer, len(sample.prompt)
    assert tokenizer is not None
    masked, _ = objective.draw(sample)  # [response]
    starts = block_starts(sample, objective)
    console.print()
    _line(
        console,
        f"sample {sample.index} ({where}): prompt {prompt} tokens, response "
        f"{len(sample.response)} ({sample.answer} answer, "
        f"{len(sample.response) - sample.answer} tail), {len(sample)} of the "
        f"{objective.config.data.row_length} of a row",
    )
    now = getattr(sample, "now", np.zeros(len(masked), dtype=bool))  # of a trajectory's state
    text = Text()
    for place, token in enumerate(sample.prompt + sample.response, -prompt):
        if place in starts:
            text.append(BORDER, style="bold yellow")
        tail = place >= sample.answer
        if place < 0:
            state = "prompt"
        elif now[place]:
            state = "decided next"
        elif masked[place]:
            state = "masked tail" if tail else "masked"
        else:
            state = "tail" if tail else "visible"
        word = END if tail else str(tokenizer.decode([token])).replace("\n", "⏎\n")
        text.append_text(_token(word, state, marks))
    console.print(text, soft_wrap=True)
    blocks = [
        f"{part.sum()}/{len(part)}={part.mean():.2f}" for part in np.split(masked, starts[1:])
    ]
    _line(console, f"masked by block: {' '.join(blocks)}")


def _line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _token(word: str, state: str, marks: bool) -> Text:
    """Write a token in its state's style, between its marks where colours do not show."""
    style, left, right = LOOKS[state]
    return Text(f"{left}{word}{right}" if marks else word, style=style)


if __name__ == "__main__":
    sys.exit(main())
