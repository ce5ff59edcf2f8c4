"""A task whose problems are rows of a file or data set, as YAML describes it:

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

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from d2f.config import Section, Seed, Switch, Text, Tokens
from d2f.data import BadRecord, Source
from d2f.errors import InputError
from d2f.tasks.judges import Judge, Own
from d2f.tasks.problem import Message, Problem, columns_of, render
from d2f.tasks.task import ALL, SPLITS, Task

Split = Literal["train", "tuning", "heldout"]
Template = Annotated[str, Field(min_length=1, max_length=20_000)]
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,99}$")]
Share = Annotated[float, Field(gt=0, le=1)]


class FewShot(Section):
    """Solved examples before the problem: written out, or rows of a split."""

    count: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Rows of the split to show."""
    split: Split = "train"
    """The split that they are taken from."""
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
        return self


class TaskFile(Section):
    """Define a task. Templates are Jinja's, over the columns of a row, and kept to the letter."""

    name: TaskName | None = None
    """Name in reports; default: the file's name."""
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
    """The problems of each split: a share of the rows of data, by a hash of each row, so that they
    never meet; or a split of the data set by name, or another file. Default: 0.2 for
    tuning, 0.8 held out."""
    prompt: Template | None = None
    """Default: the column messages, prompt or question."""
    reference: Template | None = None
    """Template of the reference that the judge compares with; default: the column reference,
    answer or response."""
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
    countdown, python, or a function of your own as module:function."""

    @field_validator("prompt", "reference", "example", "system", "gen_prefix")
    @classmethod
    def _readable(cls, template: str | None) -> str | None:
        if template is not None:
            columns_of(template)
        return template

    @model_validator(mode="after")
    def _go_together(self) -> TaskFile:
        shares = [share for share in self.splits.values() if not isinstance(share, str)]
        places = [place for place in self.splits.values() if isinstance(place, str)]
        if sum(shares) > 1 + 1e-9:
            raise ValueError(f"splits: shares must add up to at most 1, got {sum(shares):g}")
        places += [self.split or "train"] * bool(shares)
        if len(set(places)) < len(places):
            raise ValueError(
                f"splits must be disjoint, got {', '.join(sorted(places))}: give shares of one, or "
                "parts such as train[:500] and train[500:]"
            )
        if self.judge_gen_prefix and self.gen_prefix is None:
            raise ValueError("judge_gen_prefix needs a gen_prefix")
        few = self.few_shot
        if few is not None and few.count is not None and few.split not in self.splits:
            raise ValueError(
                f"few_shot.split must be one of splits, {', '.join(self.splits)}, got {few.split!r}"
            )
        return self


USUAL_PROMPTS = ("messages", "prompt", "question")
USUAL_REFERENCES = ("reference", "answer", "response")
Row = Mapping[str, Any]
Place = tuple[Source, int]
"""A row: its source, and its number there."""


class DataTask(Task):
    """The task of a `TaskFile`; its rows are read when they are first asked for.

    name: used where the file gives none. words: how a command line names it. folder: the file's,
    beside which its data may lie. data_files: local files that are read in place of its data, by
    split of the data set; PATH[10:510] is a part of the rows.
    """

    def __init__(
        self,
        file: TaskFile,
        judge: Judge,
        name: str,
        words: tuple[str, ...],
        folder: Path = Path(),
        data_files: Mapping[str, str] | None = None,
    ):
        self.file, self.judge, self.words, self.folder = file, judge, words, folder
        self.data_files = data_files or {}
        self.name = file.name or name
        self.response_length, self.stop = file.max_new_tokens, file.stop
        self.judging_seconds = judge.judging_seconds
        self._sources: dict[str | None, Source] = {}
        self._splits: dict[str, list[Place]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open data: another process opens it itself."""
        return {**vars(self), "_sources": {}, "_splits": {}}

    @property
    def notice(self) -> str | None:  # type: ignore[override]
        said = self.judge.notice
        return said and f"{self.name}: {said}"

    @property
    def identity(self) -> str:  # type: ignore[override]
        files = self.data_files or self.data_splits  # only files that were given can be read
        places = [at for at in self._places if self._split(at).partition("[")[0] in files]
        digests = sorted(self._source(place).digest for place in places)
        parts = [self.file.model_dump(mode="json"), self.judge.source, *digests]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        rows = self._rows(split)
        if count is not None and count > len(rows):
            raise ValueError(
                f"count must be at most {len(rows)}, the problems of the {split} split of "
                f"{self.name}, got {count}"
            )
        # Files are often sorted by kind or difficulty: the first ones are not like the others.
        order = np.random.default_rng(seed).permutation(len(rows))[:count]
        return [self._problem(rows[i]) for i in order.tolist()]

    def kept_back(self, split: str) -> int:
        if split == ALL or self._places != {None}:
            return 0
        return len(self._rows(ALL)) - len(self._rows(split))

    def right(self, problem: Problem, text: str) -> bool:
        if self.file.judge_gen_prefix:
            text = self._prefix(problem.row) + text
        return self.judge.right(problem, text)

    def answer(self, text: str) -> str | None:
        if self.file.judge_gen_prefix:
            if columns_of(self.file.gen_prefix or ""):
                return None  # without the row nobody knows what stands before the response
            text = self._prefix({}) + text
        return self.judge.answer(text)

    # Rows.

    @property
    def data_splits(self) -> list[str]:
        """Splits of the data set that it may read, without their brackets."""
        return sorted({self._split(place).partition("[")[0] for place in self._places})

    @property
    def _places(self) -> set[str | None]:
        """Where the splits are: parts or files by name, None for shares of the data."""
        return {at if isinstance(at, str) else None for at in self.file.splits.values()}

    def _split(self, place: str | None) -> str:
        return place or self.file.split or "train"

    def _rows(self, split: str) -> list[Place]:
        """Return the rows of a split. Raises InputError for an unknown or empty one."""
        if split not in self._splits:
            self._splits[split] = self._find(split)
        return self._splits[split]

    def _find(self, split: str) -> list[Place]:
        places: dict[str, float | str] = {str(name): at for name, at in self.file.splits.items()}
        if None in self._places:
            places[ALL] = 1.0
        if split not in places:
            raise InputError(
                f"{self.name} has no split {split}, it has {', '.join(places)}: `splits` of a task "
                "file says where they are"
            )
        place = places[split]
        source = self._source(place if isinstance(place, str) else None)
        rows = [(source, number) for number in range(len(source))]
        if isinstance(place, str) or split == ALL:
            return rows
        # The shares lie one after the other in [0, 1): where a row's hash falls is its split.
        before = [places.get(name) for name in SPLITS[: SPLITS.index(split)]]
        low = sum(share for share in before if isinstance(share, float))
        found = [row for row in rows if low <= _fraction(row) < low + place]
        if not found:
            raise InputError(
                f"{self.name}: none of the {len(rows)} rows of {source.name} fell into the share "
                f"{place:g} of the {split} split: give it a larger one"
            )
        return found

    def _source(self, place: str | None) -> Source:
        """Open a split of the data set, or another file; None is `data` itself."""
        if place not in self._sources:
            try:
                source = self._sources[place] = self._open(place)
            except InputError as error:
                raise InputError(f"{self.name}: {error}") from error
            if source.columns is not None and not isinstance(self.judge, Own):  # it may read any
                file = self.file
                given = (file.prompt, file.reference, file.example, file.system, file.gen_prefix)
                read = self.judge.columns.union(*(columns_of(one) for one in given if one))
                read |= {*USUAL_PROMPTS, *USUAL_REFERENCES}
                source.select(sorted(read & set(source.columns)))
        return self._sources[place]

    def _open(self, place: str | None) -> Source:
        file, split = self.file, self._split(place)
        if self.data_files:
            name = split.partition("[")[0]
            if name not in self.data_files:
                few = file.few_shot
                shown = few is not None and few.count and file.splits[few.split] == place
                raise InputError(
                    f"--data-files needs {name}=PATH too (its "
                    f"{'few-shot examples' if shown else 'problems'})"
                )
            found = re.fullmatch(r"(?s)(.*?)(\[[^][]*\])?", self.data_files[name])
            assert found is not None
            return Source(found[1], is_file=True, parts=(f"rows{found[2] or ''}", split))
        data = self._beside(file.data)
        if data.is_file() or data.suffix in (".jsonl", ".json", ".parquet"):
            if file.dataset_config is not None or file.split is not None:
                raise InputError("dataset_config and split are for data sets, not for a file")
            return Source(str(data if place is None else self._beside(place)), is_file=True)
        name = str(data) if data.is_dir() else file.data
        return Source(name, is_file=False, config=file.dataset_config, split=place or file.split)

    def _beside(self, name: str) -> Path:
        """Return the path of a file beside the task file, else of one of this name."""
        return self.folder / name if (self.folder / name).exists() else Path(name)

    # Problems.

    def _problem(self, place: Place) -> Problem:
        """Make a problem of a row. Raises InputError that names the row and what is wrong."""
        source, number = place
        try:
            row = _read(place)
            question, answer = self._asked(row)[-1]["content"], self._reference(row)
            given: str | list[Message] = self._prompt(row)
            if self.file.gen_prefix is not None:
                prefix, chat = self._prefix(row), not isinstance(given, str)
                begun = {"role": "assistant", "content": prefix, "prefix": True}
                given = [*given, begun] if chat else given + prefix  # type: ignore[operator]
            problem = Problem(self.name, question, answer, _key_of(row), given, row)
            self.judge.check(problem)
        except BadRecord as error:
            raise InputError(f"{self.name}: {source.where(number)}: {error}") from error
        return problem

    def _asked(self, row: Row) -> list[Message]:
        """Return the messages that end with what is asked."""
        if self.file.prompt is not None:
            return [_message("user", render(self.file.prompt, row))]
        name = _usual(row, USUAL_PROMPTS, "prompt")
        return _messages(row[name]) if name == "messages" else [_message("user", str(row[name]))]

    def _reference(self, row: Row) -> str:
        if self.file.reference is not None:
            return render(self.file.reference, row)
        # Tests in columns of their own need no other reference.
        if self.judge.columns and not set(row) & set(USUAL_REFERENCES):
            return ""
        return str(row[_usual(row, USUAL_REFERENCES, "reference")])

    def _prefix(self, row: Row) -> str:
        return render(self.file.gen_prefix or "", row)

    def _prompt(self, row: Row) -> str | list[Message]:
        """Return examples and what is asked. Raises BadRecord.

        A chat with examples in turns: system, user, assistant, user, assistant, user. In one text:
        examples and question with separators between them.
        """
        file, asked, pairs = self.file, self._asked(row), self._examples(row)
        system = [] if file.system is None else [render(file.system, row)]
        first = [_message("system", text) for text in system]
        if file.chat and (file.few_shot is None or file.few_shot.turns):
            turns = [
                _message(role, text)
                for pair in pairs
                for role, text in zip(("user", "assistant"), pair, strict=True)
            ]
            return [*first, *turns, *asked]
        if len(asked) > 1:
            raise BadRecord("several messages need a chat, with examples in turns")
        parts = [*("".join(pair) for pair in pairs), asked[0]["content"]]
        if not file.chat:
            return file.separator.join([*system, *parts])
        return [*first, _message("user", file.separator.join(parts))]

    def _examples(self, row: Row) -> list[tuple[str, str]]:
        """Return what the examples before a row ask and answer; it is never one of its own."""
        few = self.file.few_shot
        if few is None or few.count is None:
            return [] if few is None else [self._example(shown) for shown in few.examples]
        rows, own = self._rows(few.split), _key_of(row)
        order: Any = range(len(rows))
        if few.seed is not None:
            order = np.random.default_rng([few.seed, int(own[:15], 16)]).permutation(len(rows))
        found: list[tuple[str, str]] = []
        for source, number in (rows[i] for i in order):
            if len(found) == few.count:
                return found
            try:
                shown = _read((source, number))
                found += [self._example(shown)] * (_key_of(shown) != own)
            except BadRecord as error:
                raise BadRecord(f"example {source.where(number)}: {error}") from error
        if len(found) == few.count:
            return found
        raise BadRecord(
            f"few_shot.count must be at most {len(found)}, the other rows of {few.split}, got "
            f"{few.count}"
        )

    def _example(self, row: Row) -> tuple[str, str]:
        asked, file = self._asked(row)[-1]["content"], self.file
        return asked, self._reference(row) if file.example is None else render(file.example, row)


def _read(place: Place) -> Row:
    source, number = place
    row = source.record(number)
    if not isinstance(row, Mapping):
        raise BadRecord(f"expected an object of columns, got {str(row)[:60]!r}")
    return row


def _key_of(row: Any) -> str:
    content = json.dumps(row, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _fraction(place: Place) -> float:
    """Place a row in [0, 1) by its content alone, so that equal rows are in one split."""
    source, number = place
    return int(_key_of(source.attempt(number))[:13], 16) / 16**13


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _usual(row: Row, names: tuple[str, ...], what: str) -> str:
    """Find the first of the names that a row has. Raises BadRecord."""
    for name in names:
        if row.get(name) is not None:
            return name
    raise BadRecord(
        f"expected one of {', '.join(names)}, got the keys {', '.join(map(str, row))[:200]}: "
        f"`{what}` of a task file names others"
    )


def _messages(value: Any) -> list[Message]:
    """Check chat messages: they end with what is asked. Raises BadRecord."""
    turns = value if isinstance(value, list) else []
    is_text = all(
        isinstance(turn, dict) and isinstance(turn.get(key), str)
        for turn in turns
        for key in ("role", "content")
    )
    if not turns or not is_text or turns[-1]["role"] == "assistant":
        raise BadRecord(
            "messages must be a list of role and content that ends with what is asked, got "
            f"{str(value)[:60]!r}"
        )
    return [_message(turn["role"], turn["content"]) for turn in turns]
