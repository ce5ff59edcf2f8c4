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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from d2f.data import LINE, BadRecord, load_rows
from d2f.errors import InputError
from distill.config import Columns, Data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, str]]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """Hold a prompt with its response. answer: response tokens up to and with the first end token
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


def read_pair(row: Any, columns: Columns | None) -> tuple[Messages, str]:
    """Split a row into what is asked, as chat messages, and the text that answers it.

    columns: None takes `messages` where the row has them, else `prompt` and `response`. Of
    messages the last assistant turn is the answer; what follows it is not read. Raises BadRecord.
    """
    is_chat = isinstance(row, Mapping) and row.get("messages") is not None
    layout = columns or (_MESSAGES if is_chat else _PAIR)
    system: Messages = []
    if layout.system is not None and _value(row, layout.system):
        system = [{"role": "system", "content": _text(row, layout.system)}]
    if layout.messages is None:
        assert layout.prompt is not None and layout.response is not None
        asked = [{"role": "user", "content": _text(row, layout.prompt)}]
        return system + asked, _text(row, layout.response)
    turns = _value(row, layout.messages)
    if not isinstance(turns, list):
        raise BadRecord(f"{layout.messages} must be a list of messages, got {reprlib.repr(turns)}")
    messages: Messages = []
    for turn in turns:
        role = _text(turn, layout.role)
        # A template knows user and assistant; what it does with any other role is for it to say.
        messages.append({"role": _ROLES.get(role, role), "content": _text(turn, layout.content)})
    if layout.response is not None:
        return system + messages, _text(row, layout.response)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or answers[-1] == 0:
        raise BadRecord(f"{layout.messages} needs an assistant turn behind another: the response")
    return system + messages[: answers[-1]], messages[answers[-1]]["content"]


def _value(row: Any, name: str) -> Any:
    if not isinstance(row, Mapping):
        raise BadRecord(f"expected an object with {name}, got {reprlib.repr(row)}")
    if name not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise BadRecord(f"expected the key {name}, got {keys}; data.columns names others")
    return row[name]


def _text(row: Any, name: str) -> str:
    value = _value(row, name)
    if not isinstance(value, str) or not value.strip():
        raise BadRecord(f"{name} must be non-empty text, got {reprlib.repr(value)}")
    return value


class Encoder:
    """Turn rows of text into ids.

    end_ids: tokens that decoding stops at; the first, or that of `data.end_token`, ends a response.
    mask_id: no text may contain it; None where the model has none. Raises InputError for a
    tokenizer without the chat template or the end token that the configuration wants.
    """

    def __init__(
        self,
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
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
        if not end_ids:
            raise InputError("training needs a model with an end token, this one has none")
        self.end_id = end_ids[0]
        if data.end_token is not None:
            self.end_id = tokenizer.get_vocab().get(data.end_token, -1)
            if self.end_id < 0:
                raise InputError(
                    f"data.end_token must be a token of the tokenizer, got {data.end_token!r}"
                )
            if self.end_id not in end_ids:
                raise InputError(
                    f"data.end_token {data.end_token!r} has id {self.end_id}, but decoding stops "
                    f"at {', '.join(map(str, end_ids))}"
                )

    def encode_rows(self, batch: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        """Encode a batch as `datasets.map` gives and takes it: columns of values.

        prompt, response: ids, empty where there is an error. error: why a row cannot be used, None
        where it can, empty for a blank line, which is no row. text, asked: hashes of all of the
        row's text, and of its prompt.
        """
        errors: list[str | None] = []
        texts: list[tuple[str, str]] = []
        for values in zip(*batch.values(), strict=True):
            row = dict(zip(batch, values, strict=True))
            prompt = response = ""
            error: str | None = None
            try:
                if LINE not in row:
                    prompt, response = self._texts(row)
                elif row[LINE].strip():
                    prompt, response = self._texts(json.loads(row[LINE]))
                else:
                    error = ""
            except BadRecord as bad:
                error = str(bad)
            except (ValueError, RecursionError) as bad:
                error = str(BadRecord(f"not JSON ({bad}): {row[LINE].strip()[:60]!r}"))
            errors.append(error)
            texts.append((prompt, response))
        # All in one call, which fast tokenizers do in parallel. A template writes its own special
        # tokens. A response goes on where the prompt's text ends: no special token may stand
        # between them.
        asked, answers = [prompt for prompt, _ in texts], [response for _, response in texts]
        prompts = self.tokenizer(asked, add_special_tokens=not self.templated)["input_ids"]
        responses = self.tokenizer(answers, add_special_tokens=False)["input_ids"]
        for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            if errors[i] is None:
                errors[i] = self._refusal(prompt, response)
            if errors[i] is not None:
                prompts[i] = responses[i] = []
            else:
                # The one end token that is always a target; what may follow it is the tail.
                responses[i] = [*response, self.end_id]
        return {
            "prompt": prompts,
            "response": responses,
            "error": errors,
            "asked": [_hash([prompt]) for prompt in asked],
            "text": [_hash(both) for both in texts],
        }

    @property
    def identity(self) -> str:
        """Describe in one line what the ids of a text depend on."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        layout = None if self.layout is None else self.layout.model_dump()
        parts = [backend and backend.to_str(), str(self.tokenizer.chat_template), layout]
        return json.dumps([*parts, self.templated, self.end_id, self.mask_id])

    def _texts(self, row: Any) -> tuple[str, str]:
        """Render the prompt up to where the response begins. Raises BadRecord."""
        messages, response = read_pair(row, self.layout)
        if self.templated:
            from d2f.tokenizer import render

            try:
                return render(self.tokenizer, messages), response
            except InputError as error:
                raise BadRecord(str(error)) from error
        if len(messages) > 1:
            raise BadRecord("several messages need a chat template, data.chat_template is none")
        return messages[0]["content"], response

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


def _hash(texts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def kept_tokens(prompt: Ints, response: Ints, data: Data) -> Ints:
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
        self._table = _encoded(source, encoder)
        # Blank lines are no rows.
        self.numbers = np.flatnonzero([error != "" for error in self._table["error"]])
        if not len(self.numbers):
            raise InputError(f"{self.name}: expected at least one row, got none")
        if len(self.numbers) < len(self._table):
            self._table = self._table.select(self.numbers)
        prompt, response = (
            np.array([len(ids) for ids in self._table[name]]) for name in ("prompt", "response")
        )
        self.kept, self.held_out = kept_tokens(prompt, response, data), 0
        broken, long = np.flatnonzero(response == 0), (self.kept == 0) & (response > 0)
        long_prompt = long & (prompt > min(data.row_length - 1, data.max_prompt or data.row_length))
        cut = (self.kept > 0) & (self.kept < response)
        self._counts = {
            "of them with a cut response": int(cut.sum()),
            "dropped for a long prompt": int(long_prompt.sum()),
            "dropped for a long response": int(long.sum() - long_prompt.sum()),
        }
        if len(broken):
            first = f"{self.where(broken[0])}: {self._table[int(broken[0])]['error']}"
            if data.on_bad_row == "error":
                raise InputError(f"{first}; data.on_bad_row: skip goes on without it")
            self._counts[f"broken (first: {first})"] = len(broken)
        if data.on_long == "error" and long.any():
            row = int(np.argmax(long))
            limits = {"row_length", "max_prompt", "max_response"}
            known = data.model_dump(include=limits, exclude_none=True)
            said = ", ".join(f"data.{name} is {value}" for name, value in known.items())
            raise InputError(
                f"{self.where(row)}: the prompt has {prompt[row]} tokens and the response "
                f"{response[row]}, {said}; data.on_long: drop or truncate goes on without it"
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
        for rows in (by_text[text] for text in chosen):
            ids = self.encoded(rows[0])
            assert ids is not None
            found[rows[0]] = ids
            self.kept[rows] = 0
            self.held_out += len(rows)
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
        counts = self._counts | {"held out": self.held_out}
        used = f"{(self.kept > 0).sum()} of {len(self)} rows used"
        return f"{self.name}: " + ", ".join([used, *(f"{n} {w}" for w, n in counts.items() if n)])

    def refuse_nothing_left(self) -> None:
        """Raise InputError where every row is left out."""
        if not self.kept.any():
            raise InputError(f"no row is left to train on; {self.report()}")


def _wanted(name: str, there: list[str], layout: Columns | None) -> list[str]:
    """Choose the columns to read: others (images, embeddings) are not decoded."""
    found: set[str] = set()
    expected = []
    for each in (_PAIR, _MESSAGES) if layout is None else (layout,):
        names = [each.prompt, each.response, each.messages, each.system]
        columns = [column for column in names if column is not None]
        expected.append(" and ".join(columns))
        if set(columns) <= set(there):
            found.update(columns)
    if not found:
        raise InputError(
            f"{name}: expected the columns {', or '.join(expected)}, got {', '.join(there)}; "
            "data.columns names others"
        )
    return sorted(found)


def _encoded(source: Any, encoder: Encoder) -> Any:
    """Encode all rows, or take them from the cache where an earlier run has left them."""
    import datasets

    key = _hash((str(source._fingerprint), encoder.identity))
    place = Path(datasets.config.HF_DATASETS_CACHE) / "d2f-toolkit" / f"{key}.arrow"
    place.parent.mkdir(parents=True, exist_ok=True)
    ids, text = datasets.List(datasets.Value("int32")), datasets.Value("string")
    return source.map(
        encoder.encode_rows,
        batched=True,
        remove_columns=source.column_names,
        features=datasets.Features(prompt=ids, response=ids, error=text, asked=text, text=text),
        cache_file_name=str(place),
        new_fingerprint=key,
        desc="rows",
    )
