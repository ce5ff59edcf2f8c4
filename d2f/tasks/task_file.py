"""A task of a user's own data, as YAML says it.

data: openai/gsm8k
dataset_config: main
splits: {heldout: test, tuning: "train[:500]", train: "train[500:]"}
prompt: "Question: {{ question }}\\nAnswer:"
reference: "{{ answer }}"
few_shot: {count: 4, split: train}
example: " {{ answer }}"
chat: false
stop: ["Question:"]
judge: numeric
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from d2f.configuration import Section, Switch
from d2f.quantities import Seed, Text, Tokens
from d2f.tasks.templates import columns_of

Split = Literal["train", "tuning", "heldout"]
Template = Annotated[str, Field(min_length=1, max_length=20_000)]
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$")]
Share = Annotated[float, Field(gt=0, le=1)]


class FewShot(Section):
    """Solved examples before the problem: written here, or rows of a split."""

    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    """How many rows of the split."""
    split: Split = "train"
    """Where they are taken from."""
    seed: Seed | None = None
    """Draw other rows for each problem; default: the same for all, the first of the split."""
    examples: Annotated[tuple[dict[str, Any], ...], Field(max_length=1000)] = ()
    """Written out: rows with the columns that prompt and example read."""
    turns: Switch = True
    """In a chat each is a turn of user and assistant, else all stand in the user's message."""

    @model_validator(mode="after")
    def _one_source(self) -> FewShot:
        if (self.count is None) == (not self.examples):
            raise ValueError("exactly one of count and examples must be given")
        if self.examples and self.seed is not None:
            raise ValueError("seed draws rows of a split: leave it out where examples are written")
        return self


class TaskFile(Section):
    """One task. Templates are Jinja's, over the columns of a row, and kept to the letter."""

    like: Text | None = None
    """Another task file, by its path from this one or by the name that it ships under, whose keys
    hold where this one has none: those of a mapping one by one, and null takes one away."""
    name: TaskName | None = None
    """As in reports; default: the file's name."""
    data: Text
    """A file of rows (JSONL; parquet by its ending), beside this one or by its path, or a data set:
    a folder of save_to_disk, or what load_dataset takes."""
    dataset_config: Text | None = None
    """The data set's configuration, where it has several."""
    split: Text | None = None
    """The data set's split that shares are taken of; default train."""
    splits: Annotated[dict[Split, Share | Text], Field(min_length=1)] = {  # noqa: RUF012
        "tuning": 0.2,
        "heldout": 0.8,
    }
    """Where the problems of each split are: a share of the rows of data, by a hash of each row, so
    that they never meet; or a split of the data set by name, or another file. Default: 0.2 for
    tuning, 0.8 held out."""
    prompt: Template | None = None
    """Default: the column messages, prompt or question."""
    reference: Template | None = None
    """What the judge compares with; default: the column reference, answer or response."""
    example: Template | None = None
    """The response of a few-shot example; default: its reference. What stands in one text follows
    the prompt at once: begin it with a blank where one belongs there."""
    system: Template | None = None
    """The system message of a chat; without a chat the text that stands first."""
    chat: Switch = True
    """Through the model's chat template; else the text as it is."""
    gen_prefix: Template | None = None
    """The beginning of the response, which the prompt holds already and the model goes on from: to
    the letter behind what the chat template opens the answer with, without a chat behind the text.
    Examples have none but what `example` says."""
    judge_gen_prefix: Switch = False
    """Let the judge read it before the response; else it reads what the model wrote alone."""
    few_shot: FewShot | None = None
    """Solved examples before the problem; default: none."""
    separator: str = Field(default="\n\n", max_length=100)
    """Between examples, where they stand in one text."""
    stop: Annotated[tuple[Text, ...], Field(max_length=100)] = ()
    """Strings that end a response."""
    max_new_tokens: Tokens = 256
    """Most tokens of a response."""
    judge: Text | dict[str, Any]
    """A name, or a mapping of name and options: exact, numeric, choice, regex, math, contains,
    python, or a function of your own as module:function."""

    @field_validator("prompt", "reference", "example", "system", "gen_prefix")
    @classmethod
    def _readable(cls, template: str | None) -> str | None:
        if template is not None:
            columns_of(template)
        return template

    @model_validator(mode="after")
    def _go_together(self) -> TaskFile:
        shares = [share for share in self.splits.values() if not isinstance(share, str)]
        named = [place for place in self.splits.values() if isinstance(place, str)]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(f"splits: shares must add up to at most 1, got {sum(shares):g}")
        twice = next((place for place in named if named.count(place) > 1), None)
        if shares and (self.split or "train") in named:
            twice = self.split or "train"
        if twice is not None:
            raise ValueError(
                f"splits must be disjoint, got {twice!r} for two: give shares of it, or parts such "
                "as train[:500] and train[500:]"
            )
        if self.judge_gen_prefix and self.gen_prefix is None:
            raise ValueError("judge_gen_prefix needs a gen_prefix")
        few = self.few_shot
        if few is not None and few.count is not None and few.split not in self.splits:
            raise ValueError(
                f"few_shot.split must be one of splits, {', '.join(self.splits)}, got {few.split!r}"
            )
        return self
