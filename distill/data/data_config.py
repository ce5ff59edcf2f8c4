"""The configuration's section `data`: what is trained on, how long it may be, how it is packed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from d2f.configuration import Section, Switch
from d2f.quantities import Ratio, Share, Text, Tokens, Whole
from d2f.tasks.registry import TASKS

MOST_PLACES = 2**28  # of a step


def _known(task: str) -> str:
    if task not in TASKS:
        raise ValueError(f"expected a task among {', '.join(TASKS)}, got {task!r:.60}")
    return task


Task = Annotated[str, AfterValidator(_known)]


class Columns(Section):
    """Where a row has its prompt and response: two text columns, or a list of chat messages."""

    prompt: Text | None = None
    """Column of the prompt's text."""
    response: Text | None = None
    """Column of the response's text."""
    messages: Text | None = None
    """Column of a list of chat messages; the last assistant turn is the response."""
    role: Text = "role"
    """Key of the role within a message."""
    content: Text = "content"
    """Key of the text within a message."""
    system: Text | None = None
    """Column of a system message, put first where it is not empty."""

    @model_validator(mode="after")
    def _one_form(self) -> Columns:
        pair = (self.prompt is not None) + (self.response is not None)
        if pair != (2 if self.messages is None else 0):
            raise ValueError("columns need either prompt and response, or messages")
        if self.messages is None and (self.role, self.content) != ("role", "content"):
            raise ValueError("columns.role and columns.content are names within columns.messages")
        return self


COLUMNS = {
    # bespokelabs/Bespoke-Stratos-17k and what follows its layout
    "bespoke-stratos": Columns(
        messages="conversations", role="from", content="value", system="system"
    ),
    # Lansechen/bs17k_collection_filtered_*, which the published D2F models were trained on
    "d2f-reference": Columns(prompt="question", response="qwen7b_answer"),
}


class Data(Section):
    """What is trained on: generated tasks with their shares, a file (JSONL; parquet by its ending),
    or a Hugging Face data set by folder or hub name.

    A row is `prompt` and `response`, or `messages` whose last assistant turn is the response and
    whose earlier turns are the prompt; `columns` names them otherwise, or is a name of `COLUMNS`.

    Padding. A response ends with one end token; what follows it is the tail, more end tokens.
    Of a file or data set nothing of it is trained on unless asked. `train_on_padding: true` is the
    preset for what the published D2F code does: padded_share 1, short_tail 0, tail_weight 1, so
    each response is filled up with end tokens to its full length, all of them targets. The full
    length is `max_response` where given, else what the prompt leaves of `row_length` (then a row
    holds one sample, as there). The published data for LLaDA is `columns: d2f-reference`,
    `row_length: 1024`, `end_token: "<|eot_id|>"`, `on_long: drop`; for Dream it is
    `max_prompt: 924` and `on_long: truncate`.
    """

    tasks: Annotated[dict[Task, Share], Field(min_length=1)] | None = None
    """Generated tasks with their shares of the samples."""
    file: Text | None = None
    """A file of rows: JSONL, or parquet by its ending."""
    dataset: Text | None = None
    """A folder of save_to_disk, or what load_dataset takes."""
    dataset_config: Text | None = None
    """The data set's configuration, where it has several."""
    split: Text | None = None
    """Of the data set; default train."""
    columns: Text | Columns | None = None
    """Names of the columns, or one of their presets; default: as the rows say by their keys."""
    chat_template: Literal["tokenizer", "none"] = "tokenizer"
    """none: the prompt's text as it is."""
    end_token: Text | None = None
    """That ends a response; default the model's first end token."""
    max_prompt: Tokens | None = None
    """Tokens; a longer prompt is never cut."""
    max_response: Tokens | None = None
    """Tokens, with the end token."""
    on_long: Literal["error", "drop", "truncate"] = "error"
    """A sample that is too long: an error, left out, or its response cut (then without end token;
    left out where the prompt is too long). Counted and reported."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A broken row; skipped ones are counted."""
    measure_rows: Whole = 100_000
    """Most rows whose tokens are counted before the first step. Of a larger file only the form is
    checked then, and lengths are judged as the rows come."""
    row_length: Tokens = 192
    """Tokens a packed row."""
    rows: Annotated[int, Field(ge=1, le=2**16)] = 32
    """Packed rows a step, over all processes."""
    train_on_padding: Switch = False
    """Preset of the three below: responses are filled up with end tokens, all of them targets."""
    padded_share: Ratio = 0.5
    """Samples filled to the full response length with end tokens; 0 for files and data sets."""
    short_tail: Annotated[int, Field(ge=0, le=2**20)] = 7
    """Most end tokens after the first, in the other samples; 0 for files and data sets."""
    tail_weight: Ratio = 0.1
    """Loss weight of end tokens after the first."""

    @model_validator(mode="before")
    @classmethod
    def _tail_of_files(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("tasks") is not None:
            return values
        if values.get("train_on_padding") is True:
            return {"padded_share": 1.0, "short_tail": 0, "tail_weight": 1.0} | values
        return {"padded_share": 0.0, "short_tail": 0} | values

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if sum(s is not None for s in (self.tasks, self.file, self.dataset)) != 1:
            raise ValueError(
                "one of data.dataset, data.tasks and data.file must be given, and only one"
            )
        only = [] if self.dataset is not None else ["dataset_config", "split"]
        if self.tasks is not None:
            only += ["columns", "max_prompt", "max_response", "on_long", "on_bad_row"]
            only += ["measure_rows", "train_on_padding"]
        fields = type(self).model_fields
        idle = [f"data.{name}" for name in only if getattr(self, name) != fields[name].default]
        if idle:
            what = "files and data sets" if self.tasks is not None else "data.dataset"
            raise ValueError(f"{', '.join(idle)}: nothing reads it here, it is for {what} only")
        if self.rows * self.row_length > MOST_PLACES:
            raise ValueError(
                f"data.rows x data.row_length must be at most {MOST_PLACES}, "
                f"got {self.rows} x {self.row_length}"
            )
        if isinstance(self.columns, str) and self.columns not in COLUMNS:
            raise ValueError(
                f"data.columns must be one of {', '.join(COLUMNS)}, or name the columns, "
                f"got {self.columns!r}"
            )
        return self

    @property
    def layout(self) -> Columns | None:
        """The columns, None where each row says by its keys what it is."""
        return COLUMNS[self.columns] if isinstance(self.columns, str) else self.columns
