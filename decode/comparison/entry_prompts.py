"""The prompts of a workload as an entry's own tokenizer writes them."""

from __future__ import annotations

from typing import Any

from d2f import chat
from d2f.errors import InputError
from d2f.hub import base_of_adapter
from d2f.load_tokenizer import load_tokenizer
from d2f.models import resolve
from decode.comparison.workload import Workload


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a folder, hub name or bundled model; nothing else of it is fetched.
    Raises InputError."""
    try:
        place = resolve(name)
        tokenizer = load_tokenizer(resolve(base_of_adapter(place) or place))
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: its tokenizer cannot be loaded: {error}") from error
    if tokenizer is None:
        raise InputError(f"{name} has no tokenizer: text cannot be sent or counted")
    return tokenizer


def encode_all(tokenizer: Any, workload: Workload, name: str) -> list[list[int]]:
    """Each prompt's ids: messages through the chat template, text and ids as they are."""
    return [encode(tokenizer, item.prompt, f"entry {name}: {item.id}") for item in workload.items]


def encode(tokenizer: Any, prompt: Any, where: str) -> list[int]:
    """One prompt's ids. Raises InputError."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    if isinstance(prompt[0], int):
        return list(prompt)
    if tokenizer.chat_template is None:
        raise InputError(f"{where}: chat messages need a chat template, the tokenizer has none")
    try:
        return chat.encode(tokenizer, prompt)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def count_tokens(tokenizer: Any, texts: list[str]) -> list[int]:
    """Tokens of each text: the one rule that every entry's answers are counted by."""
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
