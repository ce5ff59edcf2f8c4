"""Turn rows of a file or a data set into samples of token ids.

A row (an object of `prompt` and `response`, or of chat `messages`) becomes ids once, before the
first step: `datasets` maps all rows, keeps the result on disk, and finds it again as long as the
data, the tokenizer and what turns rows into ids are the same. So every row that a run will use is
looked at before it begins.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from d2f import chat
from d2f.data import LINE, BadRecord, load_rows
from d2f.errors import InputError
from distill.config import Columns, Data

Messages = list[dict[str, str]]


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


_MESSAGES = Columns(messages="messages")
_PAIR = Columns(prompt="prompt", response="response")
_ROLES = {"human": "user", "gpt": "assistant"}  # as ShareGPT's files call them
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxdict = _REPR.maxlist = 3
_REPR.maxlevel = 2


def read_pair(row: Any, columns: Columns | None) -> tuple[Messages, str]:
    """Split a row into what is asked, as chat messages, and the text that answers it.

    columns: None takes `messages` where the row has them, else `prompt` and `response`. Raises
    BadRecord.
    """
    if not isinstance(row, Mapping):
        raise BadRecord(
            f"expected an object of prompt and response or of messages, got {_REPR.repr(row)}"
        )
    layout = columns or (_MESSAGES if row.get("messages") is not None else _PAIR)
    system: Messages = []
    if layout.system is not None and row.get(layout.system):
        system = [{"role": "system", "content": _text(row, layout.system)}]
    if layout.messages is not None:
        asked, response = _last_turn(row, layout)
        return system + asked, response
    assert layout.prompt is not None and layout.response is not None
    if layout.prompt not in row or layout.response not in row:
        raise BadRecord(
            f"expected {layout.prompt} and {layout.response}, got the keys "
            f"{', '.join(map(str, row))[:200] or 'none'}; data.columns names others"
        )
    asked = [{"role": "user", "content": _text(row, layout.prompt)}]
    return system + asked, _text(row, layout.response)


def _last_turn(row: Mapping[str, Any], layout: Columns) -> tuple[Messages, str]:
    """Split a chat at its last assistant turn; what follows that is not read."""
    turns = row.get(layout.messages or "")
    if not isinstance(turns, list) or not turns:
        raise BadRecord(f"{layout.messages} must be a list of messages, got {_REPR.repr(turns)}")
    messages: Messages = []
    for turn in turns:
        if not isinstance(turn, Mapping) or layout.role not in turn:
            raise BadRecord(
                f"a message must have {layout.role} and {layout.content}, got {_REPR.repr(turn)}"
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


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"{name} must be non-empty text, got {_REPR.repr(value)}")
    return value


class Encoder:
    """Turns rows and pairs of text into ids. end_id: the token that ends a response; mask_id: None
    where there is none, else no text may contain it.

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
        self.tokenizer, self.mask_id, self.layout = tokenizer, mask_id, data.layout
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

    def encode(self, messages: Messages, response: str) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt and of its response, the end token included. Raises
        BadRecord."""
        prompts, responses = self._ids([self._prompt(messages)], [response])
        why = self._refusal(prompts[0], responses[0])
        if why is not None:
            raise BadRecord(why)
        return prompts[0], [*responses[0], self.end_id]

    def encode_rows(self, batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Encode a batch as `datasets.map` gives and takes it: columns of values.

        prompt, response: ids, empty where there is an error. error: why a row cannot be used, None
        where it can, empty for a blank line, which is no row. text, asked: hashes of all of the
        row's text, and of its prompt.
        """
        names, columns = list(batch), list(batch.values())
        texts: dict[int, tuple[str, str]] = {}
        errors: list[str | None] = [None] * len(columns[0])
        for i, values in enumerate(zip(*columns, strict=True)):
            try:
                if names != [LINE]:
                    row = dict(zip(names, values, strict=True))
                elif values[0].strip():
                    row = _parse(values[0])
                else:
                    errors[i] = ""
                    continue
                messages, response = read_pair(row, self.layout)
                texts[i] = self._prompt(messages), response
            except BadRecord as error:
                errors[i] = str(error)
        # All in one call, which fast tokenizers do in parallel.
        prompts, responses = zip(*texts.values(), strict=True) if texts else ((), ())
        encoded = self._ids(list(prompts), list(responses))
        found = dict(zip(texts, zip(*encoded, strict=True), strict=True))
        none: tuple[list[int], list[int]] = ([], [])
        for i, (prompt, response) in found.items():
            errors[i] = self._refusal(prompt, response)
        ids = [found[i] if errors[i] is None else none for i in range(len(errors))]
        return {
            "prompt": [prompt for prompt, _ in ids],
            # The one end token that is always a target; what may follow it is the tail.
            "response": [[*response, self.end_id] if response else [] for _, response in ids],
            "error": errors,
            "asked": [_hash(texts[i][:1]) if i in texts else "" for i in range(len(errors))],
            "text": [_hash(texts[i]) if i in texts else "" for i in range(len(errors))],
        }

    @property
    def identity(self) -> str:
        """Describe in one line what the ids of a text depend on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        layout = None if self.layout is None else self.layout.model_dump()
        parts = [backend and backend.to_str(), str(self.tokenizer.chat_template), layout]
        return json.dumps([*parts, self.templated, self.end_id, self.mask_id])

    def _prompt(self, messages: Messages) -> str:
        """Render the prompt up to where the response begins. Raises BadRecord."""
        if not self.templated:
            if len(messages) > 1:
                raise BadRecord("several messages need a chat template, data.chat_template is none")
            return messages[0]["content"]
        try:
            return chat.render(self.tokenizer, messages)
        except InputError as error:
            raise BadRecord(str(error)) from error

    def _ids(self, prompts: list[str], responses: list[str]) -> tuple[Any, Any]:
        if not prompts:
            return [], []
        # A template writes its own special tokens. A response goes on where the prompt's text ends:
        # no special token may stand between them.
        asked = self.tokenizer(prompts, add_special_tokens=not self.templated)["input_ids"]
        return asked, self.tokenizer(responses, add_special_tokens=False)["input_ids"]

    def _refusal(self, prompt: list[int], response: list[int]) -> str | None:
        for name, ids in (("prompt", prompt), ("response", response)):
            if not ids:
                return f"the {name} has no tokens"
            if self.mask_id is not None and self.mask_id in ids:
                return f"the {name} contains the mask token (id {self.mask_id})"
        # Training would teach to stop there, and the rest could never be decoded.
        if self.end_id in response:
            return (
                f"the response contains its end token (id {self.end_id}) at token "
                f"{response.index(self.end_id)}: expected text, which gets one at its end"
            )
        return None


def _parse(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"not JSON ({error}): {line.strip()[:60]!r}") from error


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def kept_tokens(
    prompt: NDArray[np.int64], response: NDArray[np.int64], data: Data
) -> NDArray[np.int64]:
    """Return how many tokens of each response are kept, 0 for a row that is too long, given the
    lengths in tokens (the end token counted; 0: a broken row), ``[rows]`` each. `on_long: error` is
    as drop here."""
    room = data.row_length - prompt
    if data.max_prompt is not None:
        room = np.where(prompt > data.max_prompt, 0, room)
    room = np.minimum(room, data.max_response or data.row_length)
    long = room if data.on_long == "truncate" else np.zeros_like(room)
    return np.where(response <= room, response, np.maximum(long, 0))


class Rows:
    """The rows of a file or a data set, encoded.

    kept: tokens of each row's response that are trained on, ``[rows]``; 0 for a row that is left
    out. Raises InputError that names the row for a broken or too long one where the configuration
    does not say otherwise, and where no row is left.
    """

    def __init__(self, data: Data, encoder: Encoder):
        self.name = str(data.file or data.dataset)
        source = load_rows(
            self.name, is_file=data.file is not None, config=data.dataset_config, split=data.split
        )
        self.is_lines = source.column_names == [LINE]
        if data.dataset is not None:
            self.name += f" ({data.split or 'train'})"
        if not self.is_lines:
            source = source.select_columns(_wanted(self.name, source.column_names, data.layout))
        table = _encoded(source, encoder)
        # Blank lines are no rows.
        self.numbers = np.array([i for i, error in enumerate(table["error"]) if error != ""])
        if not len(self.numbers):
            raise InputError(f"{self.name}: expected at least one row, got none")
        self._table = table.select(self.numbers) if len(self.numbers) < len(table) else table
        prompt, response = (
            np.array([len(ids) for ids in self._table[name]]) for name in ("prompt", "response")
        )
        self.kept = kept_tokens(prompt, response, data)
        long = (self.kept == 0) & (response > 0)
        long_prompt = long & (prompt > min(data.row_length - 1, data.max_prompt or data.row_length))
        cut = (self.kept > 0) & (self.kept < response)
        self._broken, self.held_out = np.flatnonzero(response == 0).tolist(), 0
        self._counts = {
            "of them with a cut response": cut.sum(),
            "dropped for a long prompt": long_prompt.sum(),
            "dropped for a long response": long.sum() - long_prompt.sum(),
        }
        if data.on_bad_row == "error" and self._broken:
            raise InputError(f"{self._first_error()}; data.on_bad_row: skip goes on without it")
        if data.on_long == "error" and long.any():
            first = int(np.flatnonzero(long)[0])
            limits = ", ".join(
                f"data.{name} is {getattr(data, name)}"
                for name in ("row_length", "max_prompt", "max_response")
                if getattr(data, name) is not None
            )
            raise InputError(
                f"{self.where(first)}: the prompt has {prompt[first]} tokens and the response "
                f"{response[first]}, {limits}; data.on_long: drop or truncate goes on without it"
            )
        self.refuse_nothing_left()

    def __len__(self) -> int:
        return len(self.kept)

    def encoded(self, row: int) -> tuple[list[int], list[int]] | None:
        """Return the ids of a row, a long response cut; None for one that is left out."""
        if not self.kept[row]:
            return None
        found = self._table[row]
        return found["prompt"], found["response"][: self.kept[row]]

    def hold_out(self, most: int | None, seed: int) -> dict[int, tuple[list[int], list[int]]]:
        """Take rows out of training: at most so many, None for all. Returns their ids by number.

        They are chosen by a hash of their text and the seed, so which they are depends on nothing
        else, and rows that are the same text go together: one is returned, none is trained on.
        """
        by_text: dict[str, list[int]] = {}
        for row, text in self.hashes("text").items():
            by_text.setdefault(text, []).append(row)
        chosen = sorted(by_text, key=lambda text: _hash((str(seed), text)))[:most]
        found = {}
        for row, *same in (by_text[text] for text in chosen):
            ids = self.encoded(row)
            assert ids is not None
            found[row] = ids
            self.kept[[row, *same]] = 0
            self.held_out += 1 + len(same)
        return found

    def hashes(self, column: str) -> dict[int, str]:
        """Return a hash of the text (`text`) or of the prompt (`asked`) of each row that is trained
        on, by its number."""
        values = self._table[column][:]
        return {row: values[row] for row in np.flatnonzero(self.kept).tolist()}

    def where(self, row: int) -> str:
        """Say where a row is found."""
        number = int(self.numbers[row])
        return f"{self.name}, line {number + 1}" if self.is_lines else f"{self.name}, row {number}"

    def report(self) -> str:
        """Say how many rows are used, and how many are cut, dropped or broken, where any are."""
        counts = dict(self._counts)
        if self._broken:
            counts[f"broken (first: {self._first_error()})"] = len(self._broken)
        counts["held out"] = self.held_out
        used = f"{(self.kept > 0).sum()} of {len(self)} rows used"
        return f"{self.name}: " + ", ".join([used, *(f"{n} {w}" for w, n in counts.items() if n)])

    def refuse_nothing_left(self) -> None:
        """Raise InputError where every row is left out."""
        if not self.kept.any():
            raise InputError(f"no row is left to train on; {self.report()}")

    def _first_error(self) -> str:
        first = self._broken[0]
        return f"{self.where(first)}: {self._table[first]['error']}"


def _wanted(name: str, there: Sequence[str], layout: Columns | None) -> list[str]:
    """Choose the columns to read of those that a data set has."""
    if layout is None:
        wanted = [c for c in ("prompt", "response", "messages") if c in there]
        lacking = "messages" not in wanted and len(wanted) < 2
        expected = "prompt and response, or messages"
    else:
        names = (layout.prompt, layout.response, layout.messages, layout.system)
        wanted = [column for column in names if column is not None]
        lacking = not set(wanted) <= set(there)
        expected = " and ".join(wanted)
    if lacking:
        raise InputError(
            f"{name}: expected the columns {expected}, got {', '.join(there)}; data.columns names "
            "others"
        )
    return wanted


def _encoded(source: Any, encoder: Encoder) -> Any:
    """All rows as ids, from the cache of `datasets` where an earlier run has left them there."""
    import datasets

    key = _hash((str(source._fingerprint), encoder.identity))
    place = Path(datasets.config.HF_DATASETS_CACHE) / "d2f-toolkit" / f"{key}.arrow"
    ids = datasets.List(datasets.Value("int32"))
    text = datasets.Value("string")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return source.map(
            encoder.encode_rows,
            batched=True,
            remove_columns=source.column_names,
            features=datasets.Features(prompt=ids, response=ids, error=text, asked=text, text=text),
            cache_file_name=str(place),
            new_fingerprint=key,
            desc="rows",
        )
    except OSError as error:
        raise InputError(f"{place.parent}: cannot keep the encoded rows: {error}") from error
