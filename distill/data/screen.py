"""Which records of a file or data set are trained on: too long and broken ones, counted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import IntEnum, auto

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from d2f.data_records import BadRecord, Source
from d2f.errors import InputError
from distill.data import lengths
from distill.data.columns import Pair, read_pair
from distill.data.data_config import Data
from distill.data.encode import Encoded, Encoder


class Fate(IntEnum):
    """What becomes of a record."""

    UNSEEN = 0
    WHOLE = auto()
    TRUNCATED = auto()
    LONG_PROMPT = auto()
    LONG_RESPONSE = auto()
    BROKEN = auto()
    HELD_OUT = auto()


def judge(prompt: int, response: int, data: Data) -> tuple[Fate, int]:
    """What becomes of a prompt and a response (its end token counted) of these lengths in tokens,
    and how many tokens of the response are kept; `data.on_long: error` judges like drop."""
    room = data.row_length - prompt
    if room < 1 or (data.max_prompt is not None and prompt > data.max_prompt):
        return Fate.LONG_PROMPT, 0
    # Both limits hold: what the prompt leaves of the row, and the longest response.
    room = min(room, data.max_response or room)
    if response <= room:
        return Fate.WHOLE, response
    if data.on_long == "truncate":
        return Fate.TRUNCATED, room
    return Fate.LONG_RESPONSE, 0


class Screen:
    """Decides which records of a source are trained on, and encodes them.

    fates: what became of each record, int8 ``[records]`` of `Fate`.

    A set of at most `data.measure_rows` records is measured whole at once; of a larger one only the
    form of the records is checked, and lengths are judged as they come. Raises InputError that
    names the record for a broken or too long one where the configuration does not say otherwise,
    and where no record is left.
    """

    def __init__(self, source: Source, data: Data, encoder: Encoder):
        self.source, self.data, self.encoder = source, data, encoder
        self.fates: NDArray[np.int8] = np.zeros(len(source), dtype=np.int8)
        self.measured = len(source) <= data.measure_rows
        self._first_broken: str | None = None
        if self.measured:
            for first, found in self._measure():
                for record, (prompt, response) in enumerate(found.tolist(), first):
                    if prompt != lengths.BROKEN:
                        self._settle(record, prompt, response)
                    # The kept lengths say that it is broken and not why: read again, it says so or
                    # ends the run.
                    elif self.fates[record] != Fate.BROKEN:  # known from a file of lengths
                        self._encode(record)
        else:
            for first, pairs in self._pairs():
                for record, pair in enumerate(pairs, first):
                    if isinstance(pair, BadRecord):
                        self._broken(record, pair)
        self.refuse_nothing_left()

    def __len__(self) -> int:
        return len(self.fates)

    def encoded(self, record: int) -> Encoded | None:
        """The ids of a record, a long response cut where the configuration says so; None for one
        that is left out."""
        # LONG_PROMPT and what follows it in `Fate` are left out.
        if self.fates[record] > Fate.TRUNCATED:
            return None
        # Encoded only when it is asked for, so that the ids of a large set are never all in memory.
        whole = self._encode(record)
        if whole is None:
            return None
        # In a set that was not measured, this is where a record is first judged.
        kept = self._settle(record, len(whole.prompt), len(whole.response))
        return Encoded(whole.prompt, whole.response[:kept]) if kept else None

    def hold_out(self, record: int) -> None:
        """Leave a record out of training for a held-out loss."""
        self.fates[record] = Fate.HELD_OUT

    def prompt(self, record: int) -> str:
        """What a good record asks, to compare with others."""
        pair = self._pair(self.source.attempt(record))
        assert isinstance(pair, Pair)
        return str(pair.messages)

    def count_asking(self, prompts: Collection[str]) -> int:
        """The number of records to train on that have one of these prompts."""
        return sum(
            self.fates[record] <= Fate.TRUNCATED
            and isinstance(pair, Pair)
            and str(pair.messages) in prompts
            for first, pairs in self._pairs()
            for record, pair in enumerate(pairs, first)
        )

    def count(self, *fates: Fate) -> int:
        """The number of records of these fates, as far as known."""
        return int(np.isin(self.fates, fates).sum())

    def counts(self) -> dict[str, int]:
        """What was left out or cut so far, by the names of a training log."""
        return {
            "truncated": self.count(Fate.TRUNCATED),
            "dropped": self.count(Fate.LONG_PROMPT, Fate.LONG_RESPONSE),
            "broken": self.count(Fate.BROKEN),
        }

    def report(self) -> str:
        """One line: records used, and how many were cut, dropped or broken, where any were."""
        used = self.count(Fate.WHOLE, Fate.TRUNCATED)
        said = {
            Fate.TRUNCATED: "of them with a cut response",
            Fate.LONG_PROMPT: "dropped for a long prompt",
            Fate.LONG_RESPONSE: "dropped for a long response",
            Fate.BROKEN: f"broken (first: {self._first_broken})",
            Fate.HELD_OUT: "held out",
            Fate.UNSEEN: "not measured yet",
        }
        parts = [f"{self.count(fate)} {what}" for fate, what in said.items() if self.count(fate)]
        return f"{self.source.name}: " + ", ".join([f"{used} of {len(self)} rows used", *parts])

    def refuse_nothing_left(self) -> None:
        """Raise InputError where every record is left out."""
        if not self.count(Fate.UNSEEN, Fate.WHOLE, Fate.TRUNCATED):
            raise InputError(f"no row is left to train on; {self.report()}")

    def _settle(self, record: int, prompt: int, response: int) -> int:
        """Judge a record by its lengths and note its fate; how many tokens of its response are
        kept. Raises InputError where a record that is too long is an error."""
        fate, kept = judge(prompt, response, self.data)
        # At the first one, with all limits that it may have met.
        if self.data.on_long == "error" and not kept:
            limits = ", ".join(
                f"data.{name} is {getattr(self.data, name)}"
                for name in ("row_length", "max_prompt", "max_response")
                if getattr(self.data, name) is not None
            )
            raise InputError(
                f"{self.source.where(record)}: the prompt has {prompt} tokens and the response "
                f"{response}, {limits}; data.on_long: drop or truncate goes on without it"
            )
        self.fates[record] = fate
        return kept

    def _measure(self) -> Iterator[tuple[int, NDArray[np.int32]]]:
        """Lengths of all records, in chunks: the number of the chunk's first record, and the tokens
        of prompt and response, int32 ``[records, 2]``. They come from the file of an earlier run
        where there is one, which else is written at the end."""
        file = lengths.LengthsFile(self.source.digest, self.data, self.encoder)
        known = file.read(len(self))
        if known is not None:
            yield 0, known
            return
        parts = []
        for first, pairs in self._pairs():
            # The good ones of a chunk in one call, which fast tokenizers do in parallel.
            encoded = iter(self.encoder.encode([p for p in pairs if isinstance(p, Pair)]))
            part = np.full((len(pairs), 2), lengths.BROKEN, dtype=np.int32)
            for i, pair in enumerate(pairs):
                found = next(encoded) if isinstance(pair, Pair) else pair
                if isinstance(found, BadRecord):
                    self._broken(first + i, found)
                else:
                    part[i] = len(found.prompt), len(found.response)
            parts.append(part)
            yield first, part
        file.write(np.concatenate(parts))

    def _pairs(self) -> Iterator[tuple[int, list[Pair | BadRecord]]]:
        """Chunks of records: the first's number, and each as a pair or why it is none."""
        first = 0
        with tqdm(total=len(self), desc="rows", disable=None, leave=False) as bar:
            for chunk in self.source.records():
                yield first, [self._pair(record) for record in chunk]
                first += len(chunk)
                bar.update(len(chunk))

    def _pair(self, record: object) -> Pair | BadRecord:
        try:
            return record if isinstance(record, BadRecord) else read_pair(record, self.data.layout)
        except BadRecord as error:
            return error

    def _encode(self, record: int) -> Encoded | None:
        pair = self._pair(self.source.attempt(record))
        found = self.encoder.encode([pair])[0] if isinstance(pair, Pair) else pair
        if isinstance(found, Encoded):
            return found
        self._broken(record, found)
        return None

    def _broken(self, record: int, error: BadRecord) -> None:
        said = f"{self.source.where(record)}: {error}"
        if self.data.on_bad_row == "error":
            raise InputError(f"{said}; data.on_bad_row: skip goes on without it")
        self._first_broken = self._first_broken or said
        self.fates[record] = Fate.BROKEN
