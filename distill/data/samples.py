"""A sample, and its place in a packed row."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum, auto
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from d2f import chat
from d2f.data import BadRecord, Source, Table, open_records
from d2f.errors import InputError, OutputError
from d2f.files import make_folder, writing
from distill.config import Columns, Data


@dataclass(frozen=True)
class Sample:
    """One prompt with its response. answer: response tokens up to and with the first end token
    (all of them where the response was cut); what follows is the tail of end tokens."""

    index: int
    prompt: list[int]
    response: list[int]
    answer: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@dataclass(frozen=True)
class HeldOut:
    """Samples of a held-out loss, which are never trained on. said: what they are, in a line."""

    samples: list[Sample]
    said: str


@dataclass(frozen=True)
class Placed:
    """A sample in a packed row: it occupies ``[start, start + len(sample))``."""

    sample: Sample
    start: int


# A record of a file or data set as chat messages and a response.

_MESSAGES = Columns(messages="messages")
_PAIR = Columns(prompt="prompt", response="response")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxdict = _REPR.maxlist = 3
_REPR.maxlevel = 2
_ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT's files call them


@dataclass(frozen=True)
class Pair:
    """What is asked, as chat messages, and the text that answers it."""

    messages: list[dict[str, str]]
    response: str


def needed(columns: Columns) -> list[str]:
    """The columns that a record must have."""
    names = (columns.prompt, columns.response, columns.messages, columns.system)
    return [name for name in names if name is not None]


def read_pair(record: Any, columns: Columns | None) -> Pair:
    """A record's prompt and response. columns: None takes `messages` where the record has them,
    else `prompt` and `response`. Raises BadRecord."""
    if not isinstance(record, Mapping):
        raise BadRecord(
            f"expected an object of prompt and response or of messages, got {_short(record)}"
        )
    layout = columns or (_MESSAGES if record.get("messages") is not None else _PAIR)
    system: list[dict[str, str]] = []
    if layout.system is not None and record.get(layout.system):
        system = [{"role": "system", "content": _text(record, layout.system)}]
    if layout.messages is not None:
        asked, response = _last_turn(record, layout)
        return Pair(system + asked, response)
    assert layout.prompt is not None and layout.response is not None
    lacking = [name for name in (layout.prompt, layout.response) if name not in record]
    if lacking:
        raise BadRecord(
            f"expected {layout.prompt} and {layout.response}, got the keys "
            f"{', '.join(map(str, record))[:200] or 'none'}; data.columns names others"
        )
    asked = [{"role": "user", "content": _text(record, layout.prompt)}]
    return Pair(system + asked, _text(record, layout.response))


def _last_turn(record: Mapping[str, Any], layout: Columns) -> tuple[list[dict[str, str]], str]:
    """The turns before the last assistant turn, and that turn; what follows it is not read."""
    turns = record.get(layout.messages or "")
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{layout.messages} must be a list of messages, got {_short(turns)}")
    messages: list[dict[str, str]] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or layout.role not in turn:
            raise BadRecord(
                f"a message must have {layout.role} and {layout.content}, got {_short(turn)}"
            )
        role = _text(turn, layout.role)
        # A template knows user and assistant; what it does with any other role is for it to say.
        messages.append({"role": _ROLES.get(role, role), "content": _text(turn, layout.content)})
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise BadRecord(f"{layout.messages} has no assistant turn, which would be the response")
    if answers[-1] == 0:
        raise BadRecord(f"{layout.messages} has nothing before the assistant's turn")
    return messages[: answers[-1]], messages[answers[-1]]["content"]


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"{name} must be non-empty text, got {_short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can write it, no tokenizer can read it
        raise BadRecord(
            f"{name} must be text, got half a surrogate pair at character {error.start}: "
            f"{_short(value[error.start :])}"
        ) from error
    return value


def _short(value: Any) -> str:
    """A value as an error shows it: what is long or nested is not written out whole."""
    return _REPR.repr(value)


# Pairs of text as token ids, through the tokenizer's chat template.


@dataclass(frozen=True)
class Encoded:
    """Token ids of a prompt and of its response, the end token included."""

    prompt: list[int]
    response: list[int]


class Encoder:
    """Turns pairs into ids. end_id: the token that ends a response; mask_id: None where there is
    none, else no pair may contain it.

    Raises InputError for a tokenizer without the chat template or the end token that the
    configuration wants.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        end_id: int,
        mask_id: int | None,
    ):
        self.tokenizer, self.mask_id = tokenizer, mask_id
        self.templated = data.chat_template == "tokenizer"
        if self.templated and tokenizer.chat_template is None:
            raise InputError(
                f"the tokenizer {tokenizer.name_or_path or ''} has no chat template: take the "
                "tokenizer of the instruction-tuned model, save this one with a chat_template, or "
                "set data.chat_template: none, which takes prompts as they are"
            )
        self.end_id = end_id
        if data.end_token is not None:
            self.end_id = tokenizer.get_vocab().get(data.end_token, -1)
            if self.end_id < 0:
                raise InputError(
                    f"data.end_token must be a token of the tokenizer, got {data.end_token!r}"
                )

    def encode(self, pairs: Sequence[Pair]) -> list[Encoded | BadRecord]:
        """The ids of each pair, or why it has none."""
        found: list[Encoded | BadRecord | None] = [None] * len(pairs)
        texts = []
        for i, pair in enumerate(pairs):
            try:
                texts.append((i, self.prompt_text(pair.messages), pair.response))
            except BadRecord as error:
                found[i] = error
        if texts:
            # A template writes its own special tokens.
            prompts = self._ids([text for _, text, _ in texts], special=not self.templated)
            # A response goes on where the prompt's text ends: no special token may stand between
            # them.
            responses = self._ids([text for _, _, text in texts], special=False)
            for (i, *_), prompt, response in zip(texts, prompts, responses, strict=True):
                found[i] = self._checked(prompt, response)
        return [entry for entry in found if entry is not None]

    def prompt_text(self, messages: list[dict[str, str]]) -> str:
        """The prompt up to where the response begins. Raises BadRecord."""
        if not self.templated:
            if len(messages) > 1:
                raise BadRecord("several messages need a chat template, data.chat_template is none")
            return messages[0]["content"]
        try:
            return chat.render(self.tokenizer, messages)
        except InputError as error:
            raise BadRecord(str(error)) from error

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        ids: Any = self.tokenizer(texts, add_special_tokens=special)["input_ids"]
        return list(ids)

    def _checked(self, prompt: list[int], response: list[int]) -> Encoded | BadRecord:
        for name, ids in (("prompt", prompt), ("response", response)):
            if not ids:
                return BadRecord(f"the {name} has no tokens")
            if self.mask_id is not None and self.mask_id in ids:
                return BadRecord(f"the {name} contains the mask token (id {self.mask_id})")
        # Training would teach to stop there, and the rest could never be decoded.
        if self.end_id in response:
            return BadRecord(
                f"the response contains its end token (id {self.end_id}) at token "
                f"{response.index(self.end_id)}: expected text, which gets one at its end"
            )
        # The one end token that is always a target; what may follow it is the tail.
        return Encoded(prompt, [*response, self.end_id])


# Token lengths of a large set's records, kept between runs: counting them anew takes minutes.

BROKEN = -1  # in place of a broken record's lengths
SMALL = 1000  # a set of fewer records is counted faster than a file is worth

Lengths = NDArray[np.int32]


class LengthsFile:
    """Lengths of prompt and response, int32 ``[records, 2]``, under the user's cache folder
    (`XDG_CACHE_HOME`), by the content of the data, of the tokenizer, and of what turns records
    into tokens. A folder that cannot be written is no error: the lengths are counted again."""

    def __init__(self, digest: str, data: Data, encoder: Encoder):
        backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
        layout = None if data.layout is None else data.layout.model_dump()
        self.path: Path | None = None
        if backend is not None:
            # Everything that the counts depend on is in the name: what has changed finds no old
            # file.
            parts = [digest, backend.to_str(), str(encoder.tokenizer.chat_template), layout]
            key = json.dumps([*parts, data.chat_template, encoder.end_id, encoder.mask_id])
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            name = hashlib.sha256(key.encode()).hexdigest()[:32]
            self.path = cache / "d2f-toolkit" / "lengths" / f"{name}.npy"

    def read(self, records: int) -> Lengths | None:
        """What was kept, None where there is nothing that fits."""
        if self.path is None or records < SMALL:
            return None
        try:
            found = np.load(self.path)
        except (OSError, ValueError, EOFError):
            return None
        # A damaged or foreign file is counted as none.
        return found if found.shape == (records, 2) and found.dtype == np.int32 else None

    def write(self, lengths: Lengths) -> None:
        """Keep lengths, whole or not at all."""
        if self.path is None or len(lengths) < SMALL:
            return
        with suppress(OutputError):
            make_folder(self.path.parent)
            with writing(self.path) as file:
                np.save(file, lengths)


# Which records of a file or data set are trained on: too long and broken ones, counted.


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
                    if prompt != BROKEN:
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
        file = LengthsFile(self.source.digest, self.data, self.encoder)
        known = file.read(len(self))
        if known is not None:
            yield 0, known
            return
        parts = []
        for first, pairs in self._pairs():
            # The good ones of a chunk in one call, which fast tokenizers do in parallel.
            encoded = iter(self.encoder.encode([p for p in pairs if isinstance(p, Pair)]))
            part = np.full((len(pairs), 2), BROKEN, dtype=np.int32)
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


# The records of the section `data`: its file or data set, and the columns that are read.

_USUAL = ("prompt", "response", "messages")


def open_source(data: Data) -> Source:
    """The records of `data.file` or `data.dataset`. Raises InputError that says what there is."""
    place = data.file or data.dataset
    assert place is not None
    source = open_records(
        place, is_file=data.file is not None, config=data.dataset_config, split=data.split
    )
    if isinstance(source, Table):
        _select(source, data.layout)
    return source


def _select(table: Table, columns: Columns | None) -> None:
    there = table.columns
    wanted = needed(columns) if columns else [c for c in _USUAL if c in there]
    lacking = [column for column in wanted if column not in there]
    if lacking or (columns is None and "messages" not in wanted and len(wanted) < 2):
        expected = " and ".join(wanted if columns else ("prompt", "response"))
        raise InputError(
            f"{table.name}: expected the columns {expected}{'' if columns else ', or messages'}, "
            f"got {', '.join(there)}; data.columns names others"
        )
    table.select(wanted)
