"""Turn chat messages into a prompt by the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from d2f.errors import InputError


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Write messages as text, up to where the answer begins.

    A last message of the assistant whose `prefix` is true is the beginning of the answer and
    follows to the letter. transformers runs the template in jinja's sandbox. Raises InputError
    for messages that the template refuses.
    """
    # The last part of a folder alone: a server's clients see it.
    name = f"the chat template of {Path(tokenizer.name_or_path).name or 'the tokenizer'}"
    if tokenizer.chat_template is None:
        raise InputError(f"{name}: expected one, the tokenizer has none")
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise InputError(f"{name}: expected messages with role and content, got {messages!r:.60}")
    prefix: Any = ""
    if messages[-1].get("role") == "assistant" and messages[-1].get("prefix") is True:
        messages, prefix = messages[:-1], messages[-1].get("content")
    if not messages or not isinstance(prefix, str):
        raise InputError(
            f"expected a question and text as the beginning of the answer, got {prefix!r:.60}"
        )
    said = [{k: v for k, v in message.items() if v is not None} for message in messages]
    try:
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template can raise whatever Python does
        raise InputError(f"{name} refused the messages: {type(error).__name__}: {error}") from error
    return str(text) + prefix


def encode(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Render messages as token ids. Raises InputError."""
    text = render(tokenizer, messages)
    try:
        # The template writes special tokens itself; added ones would double the first.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except TypeError as error:  # half a surrogate pair, which JSON can say
        raise InputError(f"the messages are not Unicode text: {error}") from error
