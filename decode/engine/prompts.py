"""Prompts as text, chat messages or ids, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from d2f.errors import InputError, repr_of
from d2f.model import DiffusionModel
from d2f.tokenizer import encode as encode_chat
from decode.decoders.base import DEFAULT_MAX_NEW_TOKENS, Decoder

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Message | Sequence[Message]

EXPECTED = "expected text, chat messages or ids"


def as_many(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Make a list of prompts, whether one or many were given. Raises InputError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    many = _listed(prompts)
    if many is None:
        raise InputError(f"prompts: {EXPECTED}, one or a list of them, got {repr_of(prompts)}")
    alone = bool(many) and isinstance(many[0], Mapping | Integral)  # messages, or ids
    return [many] if alone else many


def encode(model: DiffusionModel, prompt: Prompt, where: str, *, raw: bool = False) -> list[int]:
    """Turn a prompt into ids. Raises InputError, which begins with `where`.

    Chat messages go through the tokenizer's chat template, and so does text, as a user message,
    where there is a template and not `raw`.
    """
    text = prompt if isinstance(prompt, str) else None
    parts: Any = [prompt] if isinstance(prompt, str | Mapping) else _listed(prompt)
    if parts is None:
        raise InputError(f"{where}: {EXPECTED}, got {repr_of(prompt)}")
    if text is None and not any(isinstance(part, Mapping) for part in parts):
        # bool is a subclass of int: True would pass as the id 1.
        if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in parts):
            raise InputError(f"{where}: expected whole token ids, got {repr_of(parts[:5])}")
        return [int(token) for token in parts]
    odd = [part for part in parts if text is None and not isinstance(part, Mapping)]
    if odd:
        raise InputError(f"{where}: expected chat messages alone, got {repr_of(odd[0])} among them")
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        raise InputError(f"{where}: text needs a tokenizer, {model.path} has none; give ids")
    if text == "":
        raise InputError(f"{where} is empty: expected at least one token")
    try:
        if text is None and tokenizer.chat_template is None:
            raise InputError(f"chat messages need a chat template, {model.path} has none")
        if text is not None and (raw or tokenizer.chat_template is None):
            # Here the tokenizer adds its own special tokens; a chat template writes them itself,
            # so `encode_chat` adds none: the BOS would be doubled.
            return list(tokenizer(text)["input_ids"])
        messages = parts if text is None else [{"role": "user", "content": text}]
        return encode_chat(tokenizer, messages)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair
        raise InputError(f"{where} is not Unicode text: {error}") from error


def _listed(value: Any) -> list[Any] | None:
    """List what a list, tensor or array holds, None where it is none: bytes are not meant as ids, a
    set has no order, an iterator would be used up."""
    value = value.tolist() if hasattr(value, "tolist") else value
    odd = isinstance(value, bytes | bytearray | memoryview | set | frozenset)
    return None if odd or not hasattr(value, "__len__") else list(value)


def fitted(model: DiffusionModel, ids: Sequence[int], decoder: Decoder, where: str) -> Decoder:
    """Set the decoder's max_new_tokens where it says none: the longest response that the model was
    trained on, else 256, less where the context leaves less. Raises InputError where it leaves
    none."""
    if decoder.max_new_tokens is not None:
        return decoder
    room = model.context_length - len(ids) - decoder.extra_positions
    if room < 1:
        raise InputError(
            f"{where} has {len(ids)} tokens, the model's context is {model.context_length}: no "
            "room for a response"
        )
    usual = model.contract.response_length or DEFAULT_MAX_NEW_TOKENS
    length: Any = {"max_new_tokens": min(usual, room)}  # a field of every decoder
    return replace(decoder, **length)


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
    extra = decoder.extra_positions
    total = len(ids) + decoder.length + extra
    if total > model.context_length:
        after = f" and {extra} positions after them" if extra else ""
        raise InputError(
            f"{where} has {len(ids)} tokens; with max_new_tokens={decoder.length}{after} that is "
            f"{total}, the model's context is {model.context_length}"
        )


def checked(
    model: DiffusionModel, prompt: Prompt, decoder: Decoder, where: str, *, raw: bool
) -> tuple[list[int], Decoder]:
    """Return a prompt's ids and its decoder, which fit each other and the model. Raises
    InputError."""
    decoder.check(model.contract)
    if decoder.stop and model.tokenizer is None:
        raise InputError(f"stop strings need a tokenizer, {model.path} has none")
    ids = encode(model, prompt, where, raw=raw)
    decoder = fitted(model, ids, decoder, where)
    check(model, ids, decoder, where)
    return ids, decoder
