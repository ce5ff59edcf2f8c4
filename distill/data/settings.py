"""The configuration's section `data`: what is trained on, how long it may be, how it is packed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from d2f.configuration import Section, Switch

Positive = Annotated[int, Field(gt=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]


class Columns(Section):
    """Where a row has its prompt and response: two text columns, or a list of chat messages."""

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None  # the last assistant turn is the response
    role: str = "role"  # names within a message
    content: str = "content"
    system: str | None = None  # column of a system message, put first where it is not empty

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

    tasks: dict[str, Annotated[float, Field(gt=0)]] | None = None
    file: str | None = None
    dataset: str | None = None  # a folder of save_to_disk, or what load_dataset takes
    dataset_config: str | None = None  # its configuration's name, where it has several
    split: str | None = None  # of the data set; default train
    columns: str | Columns | None = None
    chat_template: Literal["tokenizer", "none"] = "tokenizer"  # none: the prompt's text as it is
    end_token: str | None = None  # that ends a response; default the model's first end token
    max_prompt: Positive | None = None  # tokens; a longer prompt is never cut
    max_response: Positive | None = None  # tokens, with the end token
    # A sample that is too long: an error, left out, or its response cut (then without end token;
    # left out where the prompt is too long). Counted and reported.
    on_long: Literal["error", "drop", "truncate"] = "error"
    on_bad_row: Literal["error", "skip"] = "error"  # a broken row; skipped ones are counted
    # Most rows whose tokens are counted before the first step. Of a larger file only the form is
    # checked then, and lengths are judged as the rows come.
    measure_rows: Annotated[int, Field(ge=0)] = 100_000
    row_length: Positive = 192  # tokens a packed row
    rows: Positive = 32  # packed rows a step, over all processes
    train_on_padding: Switch = False  # preset of the three below, see above
    # The defaults are for generated tasks; for files and data sets the first two are 0.
    padded_share: Ratio = 0.5  # samples filled to the full response length with end tokens
    short_tail: Annotated[int, Field(ge=0)] = 7  # most end tokens after the first, in the others
    tail_weight: Ratio = 0.1  # loss weight of end tokens after the first

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
