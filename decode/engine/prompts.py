"""Prompts as text, chat messages or ids, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from d2f import chat
from d2f.errors import InputError, repr_of
from d2f.model import DiffusionModel
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS, Decoder

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Message | Sequence[Message]

EXPECTED = "expected text, chat messages or ids"


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or many were given. Raises InputError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = _listed(_plain(prompts))
    if many is None:
        raise InputError(f"prompts: {EXPECTED}, one or a list of them, got {repr_of(prompts)}")
    alone = bool(many) and isinstance(many[0], Mapping | Integral)  # messages, or ids
    return [many] if alone else many


def encode(model: DiffusionModel, prompt: Prompt, where: str, *, raw: bool = False) -> list[int]:
    """A prompt's ids. Chat messages go through the tokenizer's chat template, and so does text, as
    a user message, where there is one and not `raw`. Raises InputError."""
    prompt = _plain(prompt)
    # An iterator would be used up by the first look at it, and it is looked at several times.
    if not isinstance(prompt, str) and (not hasattr(prompt, "__len__") or _listed(prompt) is None):
        raise InputError(f"{where}: {EXPECTED}, got {repr_of(prompt)}")
    messages = _messages(prompt, where)
    if messages is None and not isinstance(prompt, str):
        # bool is a subclass of int: True would pass as the id 1.
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
            raise InputError(f"{where}: expected whole token ids, got {repr_of(list(prompt)[:5])}")
        return [int(token) for token in prompt]  # type: ignore[arg-type]
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise InputError(f"{where}: text needs a tokenizer, {model.path} has none; give ids")
    if not len(prompt):
        raise InputError(f"{where} is empty: expected at least one token")
    if messages is None:
        _check_unicode([prompt], where)
        if raw or tokenizer.chat_template is None:
            # Here the tokenizer adds its own special tokens; a chat template writes them itself,
            # so `chat.encode` adds none: the BOS would be doubled.
            return list(tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
    elif tokenizer.chat_template is None:
        raise InputError(f"{where}: chat messages need a chat template, {model.path} has none")
    else:
        _check_unicode([part for m in messages for part in m.values()], where)
    try:
        return chat.encode(tokenizer, messages)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def _plain(value: Any) -> Any:
    """Lists of numbers in place of a tensor or an array of them."""
    return value.tolist() if hasattr(value, "tolist") else value


def _listed(value: Any) -> list[Any] | None:
    """What a list of any kind holds, None where it is none: bytes are not meant as ids, a set has
    no order."""
    if isinstance(value, bytes | bytearray | memoryview | set | frozenset):
        return None
    try:
        return list(value)
    except TypeError:
        return None


def _messages(prompt: Prompt, where: str) -> list[Message] | None:
    """The chat messages of a prompt, None where it is text or ids. Raises InputError for a list
    that has both."""
    if isinstance(prompt, Mapping):
        return [prompt]
    if isinstance(prompt, str) or not any(isinstance(part, Mapping) for part in prompt):
        return None
    for part in prompt:
        if not isinstance(part, Mapping):
            raise InputError(
                f"{where}: expected chat messages alone, got {repr_of(part)} among them"
            )
    return list(prompt)  # type: ignore[arg-type]


def _check_unicode(parts: Sequence[object], where: str) -> None:
    """Raise InputError for half of a surrogate pair, which no tokenizer takes."""
    try:
        "".join(part for part in parts if isinstance(part, str)).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where} is not Unicode text: {error}") from error


def default_length(
    model: DiffusionModel, ids: Sequence[int], where: str, *, overhang: int = 0
) -> int:
    """Tokens of a response that nobody said the length of: 256, less where the context leaves less.
    overhang: of the decoder. Raises InputError where it leaves none."""
    room = model.context_length - len(ids) - overhang
    if room < 1:
        raise InputError(
            f"{where} has {len(ids)} tokens, the model's context is {model.context_length}: no "
            "room for a response"
        )
    return min(DEFAULT_MAX_NEW_TOKENS, room)


def fitted(model: DiffusionModel, ids: Sequence[int], decoder: Decoder, where: str) -> Decoder:
    """The decoder with its max_new_tokens, the default one where it says none. Raises
    InputError."""
    if decoder.max_new_tokens is not None:
        return decoder
    length: Any = {"max_new_tokens": default_length(model, ids, where, overhang=decoder.overhang)}
    return replace(decoder, **length)  # a field of every decoder, but not of their base


def check(model: DiffusionModel, ids: list[int], decoder: Decoder, where: str) -> None:
    """Raise InputError if `ids` cannot be decoded by `decoder` on `model`."""
    if not ids:
        raise InputError(f"{where} is empty: expected at least one token")
    vocab_size = model.vocab_size  # transformers takes some microseconds to look it up
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise InputError(f"{where}: ids must lie in [0, {vocab_size}), got {repr_of(wrong[0])}")
    if model.mask_id is not None and model.mask_id in ids:
        raise InputError(
            f"{where} contains the mask id {model.mask_id} at position {ids.index(model.mask_id)}: "
            "a prompt is never masked"
        )
    total = len(ids) + decoder.length + decoder.overhang
    if total > model.context_length:
        after = f" and {decoder.overhang} positions after them" if decoder.overhang else ""
        raise InputError(
            f"{where} has {len(ids)} tokens; with max_new_tokens={decoder.length}{after} that is "
            f"{total}, the model's context is {model.context_length}"
        )


def checked(
    model: DiffusionModel, prompt: Prompt, decoder: Decoder, where: str, *, raw: bool
) -> tuple[list[int], Decoder]:
    """A prompt's ids and its decoder, which fit each other and the model. Raises InputError."""
    decoder.check(model.contract)
    if decoder.stop and model.tokenizer is None:
        raise InputError(f"stop strings need a tokenizer, {model.path} has none")
    ids = encode(model, prompt, where, raw=raw)
    decoder = fitted(model, ids, decoder, where)
    check(model, ids, decoder, where)
    return ids, decoder
