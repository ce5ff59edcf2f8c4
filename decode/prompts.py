"""Prompts as text, chat messages or ids, checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from d2f import chat
from d2f.errors import InputError
from d2f.model import DiffusionModel
from decode.decoders.base import Decoder

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode(model: DiffusionModel, prompt: Prompt, where: str) -> list[int]:
    """A prompt's ids: text as it is, chat messages through the chat template. Raises InputError."""
    if not isinstance(prompt, str) and not hasattr(prompt, "__len__"):
        raise InputError(f"{where}: expected text, chat messages or ids, got {prompt!r}")
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if model.tokenizer is None:
            raise InputError(f"{where}: text needs a tokenizer, {model.path} has none; give ids")
        if not len(prompt):
            raise InputError(f"{where} is empty: expected at least one token")
        if isinstance(prompt, str):
            return list(model.tokenizer(prompt)["input_ids"])
        if model.tokenizer.chat_template is None:
            raise InputError(f"{where}: chat messages need a chat template, {model.path} has none")
        try:
            return chat.encode(model.tokenizer, prompt)  # type: ignore[arg-type]
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt):
        raise InputError(f"{where}: expected whole token ids, got {list(prompt)[:5]}")
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def check(model: DiffusionModel, ids: list[int], decoder: Decoder, where: str) -> None:
    """Raise InputError if `ids` cannot be decoded by `decoder` on `model`."""
    if not ids:
        raise InputError(f"{where} is empty: expected at least one token")
    wrong = [token for token in ids if not 0 <= token < model.vocab_size]
    if wrong:
        raise InputError(f"{where}: ids must lie in [0, {model.vocab_size}), got {wrong[0]}")
    if model.mask_id is not None and model.mask_id in ids:
        raise InputError(
            f"{where} contains the mask id {model.mask_id} at position {ids.index(model.mask_id)}: "
            "a prompt is never masked"
        )
    total = len(ids) + decoder.max_new_tokens
    if total > model.context_length:
        raise InputError(
            f"{where} has {len(ids)} tokens; with max_new_tokens={decoder.max_new_tokens} that is "
            f"{total}, the model's context is {model.context_length}"
        )
