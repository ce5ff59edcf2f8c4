"""Samples by index, packed into rows: the same stream whatever the processes or resumes.

A step is `rows` packed rows. Samples are taken in order; each goes to the first row with room;
the first that fits nowhere opens the next step. So the position in the data is one number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from d2f import noise
from d2f.errors import InputError
from d2f.tasks import TASKS, make_problem
from d2f.tasks.registry import RESPONSE_LENGTH
from distill.config import Data


@dataclass(frozen=True)
class Sample:
    """One prompt with its response. answer: response tokens up to and with the first end token;
    what follows is the tail of end tokens."""

    index: int
    prompt: list[int]
    response: list[int]
    answer: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class Placed:
    """A sample in a packed row: it occupies ``[start, start + len(sample))``."""

    sample: Sample
    start: int


class Stream:
    """Samples by index. `sample(i)` does not depend on any other call."""

    def __init__(
        self, data: Data, tokenizer: PreTrainedTokenizerBase, end_id: int, seed: int, tail: bool
    ):
        self.data, self.tokenizer, self.end_id, self.seed = data, tokenizer, end_id, seed
        self.tail = tail
        self._draw: Callable[[int], tuple[str, str, int]]
        if data.tasks is not None:
            unknown = sorted(set(data.tasks) - set(TASKS))
            if unknown:
                raise InputError(f"data.tasks must be among {list(TASKS)}, got {unknown}")
            self._names = list(data.tasks)
            shares = np.array(list(data.tasks.values()), dtype=float)
            self._shares = shares / shares.sum()
            self._draw = self._from_tasks
        else:
            assert data.file is not None
            self._lines = read_pairs(data.file)
            self._draw = self._from_file

    def sample(self, index: int) -> Sample:
        """Sample `index`. Raises InputError if it cannot fit in a row."""
        question, answer, full = self._draw(index)
        prompt = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        response = [*self.tokenizer(answer, add_special_tokens=False)["input_ids"], self.end_id]
        kept = len(response)
        if self.tail:
            rng = noise.sample_rng(self.seed, index, noise.TAIL)
            if rng.random() < self.data.padded_share:
                extra = max(0, full - kept)
            else:
                extra = int(rng.integers(self.data.short_tail + 1))
            response += [self.end_id] * extra
        sample = Sample(index, prompt, response, kept)
        if len(sample) > self.data.row_length:
            raise InputError(
                f"sample {index} has {len(sample)} tokens, data.row_length is "
                f"{self.data.row_length}"
            )
        return sample

    def _from_tasks(self, index: int) -> tuple[str, str, int]:
        rng = noise.sample_rng(self.seed, index, noise.CONTENT)
        name = self._names[int(rng.choice(len(self._names), p=self._shares))]
        problem = make_problem(name, "train", index, self.seed)
        return problem.question, problem.answer, RESPONSE_LENGTH[name]

    def _from_file(self, index: int) -> tuple[str, str, int]:
        epoch, place = divmod(index, len(self._lines))
        order = noise.sample_rng(self.seed, epoch, noise.ORDER).permutation(len(self._lines))
        prompt, response = self._lines[int(order[place])]
        return prompt, response, 0


def read_pairs(path: str | Path) -> list[tuple[str, str]]:
    """(prompt, response) of every line of a JSONL file. Raises InputError naming the line."""
    pairs = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            values = json.loads(line)
            pair = (values["prompt"], values["response"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}, line {number}: expected an object with prompt and response, "
                f"got {line[:60]!r}"
            ) from error
        if not all(isinstance(part, str) and part for part in pair):
            raise InputError(f"{path}, line {number}: prompt and response must be non-empty text")
        pairs.append(pair)
    if not pairs:
        raise InputError(f"{path}: expected at least one line, got none")
    return pairs


def fill_rows(stream: Stream, first: int) -> tuple[list[list[Placed]], int]:
    """The packed rows of the step that begins at sample `first`, and the next step's first."""
    rows: list[list[Placed]] = [[] for _ in range(stream.data.rows)]
    used = [0] * len(rows)
    index = first
    while True:
        sample = stream.sample(index)
        place = next(
            (i for i, n in enumerate(used) if n + len(sample) <= stream.data.row_length), None
        )
        if place is None:
            return rows, index
        rows[place].append(Placed(sample, used[place]))
        used[place] += len(sample)
        index += 1


def lay_out(rows: list[list[Placed]], length: int) -> tuple[Tensor, Tensor]:
    """Clean ids and positions, int64 ``[rows, length]``; unused places hold 0."""
    ids = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros_like(ids)
    for r, row in enumerate(rows):
        for placed in row:
            part = slice(placed.start, placed.start + len(placed.sample))
            ids[r, part] = placed.sample.prompt + placed.sample.response
            positions[r, part] = np.arange(len(placed.sample))
    return torch.from_numpy(ids), torch.from_numpy(positions)
