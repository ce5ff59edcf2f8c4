"""A task whose problems are rows of a file or data set."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from d2f.data_records import BadRecord
from d2f.errors import InputError
from d2f.tasks.judges import Judge
from d2f.tasks.judges.own import Own
from d2f.tasks.problem import Message, Problem
from d2f.tasks.task import ALL, Task
from d2f.tasks.task_file import TaskFile
from d2f.tasks.task_rows import (
    USUAL_PROMPTS,
    USUAL_REFERENCES,
    Place,
    Row,
    TaskRows,
    key_of,
    read_row,
)
from d2f.tasks.templates import columns_of, render


class DataTask(Task):
    """The task of a `TaskFile`. name: where the file says none. words: how a command line names
    it. folder: of the file, beside which its data may lie."""

    def __init__(
        self,
        file: TaskFile,
        judge: Judge,
        name: str,
        words: tuple[str, ...],
        folder: Path = Path(),
    ):
        self.file, self.judge, self.words = file, judge, words
        self.name = file.name or name
        self.response_length, self.stop = file.max_new_tokens, file.stop
        self.judging_seconds = judge.judging_seconds
        self.rows = TaskRows(file, self.name, folder, self._columns())

    @cached_property
    def notice(self) -> str | None:  # type: ignore[override]
        return None if self.judge.notice is None else f"{self.name}: {self.judge.notice}"

    @property
    def identity(self) -> str:  # type: ignore[override]
        said = self.file.model_dump(mode="json")
        parts = [said, self.judge.source, *self.rows.digests]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def problems(self, split: str, count: int | None, seed: int = 0) -> list[Problem]:
        rows = self.rows.of(split)
        if count is not None and count > len(rows):
            raise ValueError(
                f"count must be at most {len(rows)}, the problems of the {split} split of "
                f"{self.name}, got {count}"
            )
        # Files are often sorted by kind or difficulty: the first ones are not like the others.
        order = np.random.default_rng(seed).permutation(len(rows))[:count]
        return [self._problem(rows[i]) for i in order.tolist()]

    def kept_back(self, split: str) -> int:
        if split == ALL or not self.rows.are_shares:
            return 0
        return len(self.rows.of(ALL)) - len(self.rows.of(split))

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

    def _columns(self) -> set[str] | None:
        """Those that templates and judge read; None where a judge of the user's own may read
        any."""
        if isinstance(self.judge, Own):
            return None
        file = self.file
        given = (file.prompt, file.reference, file.example, file.system, file.gen_prefix)
        return self.judge.columns.union(*(columns_of(one) for one in given if one))

    def _problem(self, place: Place) -> Problem:
        """A row as a problem. Raises InputError that says which row, and what is wrong with it."""
        source, number = place
        try:
            row = read_row(place)
            question, answer = self._question(row), self._reference(row)
            problem = Problem(self.name, question, answer, key_of(row), self._given(row), row)
            self.judge.check(problem)
        except BadRecord as error:
            raise InputError(f"{self.name}: {source.where(number)}: {error}") from error
        return problem

    def _question(self, row: Row) -> str:
        """The text that is asked. Raises BadRecord."""
        return self._asked(row)[-1]["content"]

    def _asked(self, row: Row) -> list[Message]:
        """The messages that end with what is asked."""
        if self.file.prompt is not None:
            return [_message("user", render(self.file.prompt, row))]
        name = _usual(row, USUAL_PROMPTS, "prompt")
        return _messages(row[name]) if name == "messages" else [_message("user", str(row[name]))]

    def _reference(self, row: Row) -> str:
        if self.file.reference is not None:
            return render(self.file.reference, row)
        # What is judged by tests in columns of their own needs no other reference.
        if self.judge.columns and not set(row) & set(USUAL_REFERENCES):
            return ""
        return str(row[_usual(row, USUAL_REFERENCES, "reference")])

    def _given(self, row: Row) -> str | list[Message]:
        """What the model is given: what `_prompt` says, and the beginning of the response. Raises
        BadRecord."""
        prompt = self._prompt(row)
        if self.file.gen_prefix is None:
            return prompt
        if isinstance(prompt, str):
            return prompt + self._prefix(row)
        return [*prompt, _message("assistant", self._prefix(row)) | {"prefix": True}]

    def _prefix(self, row: Row) -> str:
        return render(self.file.gen_prefix or "", row)

    def _prompt(self, row: Row) -> str | list[Message]:
        """Examples, and what is asked. Raises BadRecord.

        A chat with examples in turns: system, user, assistant, user, assistant, user. In one text:
        examples and question with separators between them.
        """
        file, asked = self.file, self._asked(row)
        system = [] if file.system is None else [render(file.system, row)]
        pairs = [(self._question(shown), self._response(shown)) for shown in self._shown(row)]
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

    def _response(self, row: Row) -> str:
        """Of an example."""
        if self.file.example is not None:
            return render(self.file.example, row)
        return self._reference(row)

    def _shown(self, row: Row) -> list[Row]:
        """The rows of the examples before a row, which is never one of its own."""
        few = self.file.few_shot
        if few is None or few.count is None:
            return [] if few is None else list(few.examples)
        rows, own = self.rows.of(few.split), key_of(row)
        order: Any = range(len(rows))
        if few.seed is not None:
            order = np.random.default_rng([few.seed, int(own[:15], 16)]).permutation(len(rows))
        found: list[Row] = []
        for i in order:
            shown = read_row(rows[i])
            if key_of(shown) != own:
                found.append(shown)
            if len(found) == few.count:
                return found
        raise BadRecord(
            f"few_shot.count must be at most {len(found)}, the other rows of {few.split}, got "
            f"{few.count}"
        )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _usual(row: Row, names: tuple[str, ...], what: str) -> str:
    """The first of the names that a row has. Raises BadRecord."""
    found = next((name for name in names if row.get(name) is not None), None)
    if found is None:
        raise BadRecord(
            f"expected one of {', '.join(names)}, got the keys {', '.join(map(str, row))[:200]}: "
            f"`{what}` of a task file names others"
        )
    return found


def _messages(value: Any) -> list[Message]:
    """A column of chat messages that ends with what is asked. Raises BadRecord."""
    well = isinstance(value, list) and all(
        isinstance(turn, dict)
        and isinstance(turn.get("role"), str)
        and isinstance(turn.get("content"), str)
        for turn in value
    )
    if not well or not value or value[-1]["role"] == "assistant":
        raise BadRecord(
            "messages must be a list of role and content that ends with what is asked, got "
            f"{str(value)[:60]!r}"
        )
    return [_message(turn["role"], turn["content"]) for turn in value]
