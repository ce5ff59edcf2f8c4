"""Read and save a checkpoint's tokenizer, and write chat messages by its template."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TokenizersBackend,
)

from d2f import tokenization_d2f
from d2f.checkpoint import read_object
from d2f.errors import CheckpointError, InputError
from d2f.families import FAMILIES

CODE = Path(tokenization_d2f.__file__)
OWN_CLASS = {"AutoTokenizer": [None, f"{CODE.stem}.{tokenization_d2f.D2FTokenizer.__name__}"]}
# Classes that are nothing but tokenizer.json.
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast", None)


def load_tokenizer(place: str) -> PreTrainedTokenizerBase | None:
    """Read a checkpoint's tokenizer, None where it has none or one without a vocabulary; its own
    code is never run. Raises CheckpointError where it cannot be read without."""
    folder = Path(place)
    settings, whole = folder / "tokenizer_config.json", (folder / "tokenizer.json").is_file()
    if not whole and not settings.is_file():
        return None
    kind = read_object(settings, CheckpointError) if settings.is_file() else {}
    generic = kind.get("tokenizer_class") in _GENERIC
    if generic and not whole and settings.is_file() and kind.get("tokenizer_class"):
        return None  # special tokens alone make no token of any text
    try:
        if generic and whole:
            # AutoTokenizer would go by the model's type and cut text as that model's own does.
            tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
        else:
            tokenizer = _read_tokenizer(folder)
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever comes
        raise CheckpointError(f"{place}: its tokenizer cannot be read: {error}") from error
    return tokenizer if tokenizer.get_vocab().keys() - tokenizer.get_added_vocab() else None


def _read_tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (KeyError, ValueError, OSError):
        # Its class is code of the checkpoint's, which is not run: Dream's is Qwen2's tokenizer.
        for kind in {family.tokenizer for family in FAMILIES.values()} - {None}:
            if (folder / kind.vocab_files_names["vocab_file"]).is_file():
                return kind.from_pretrained(folder)
        raise


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer beside a model's config.json, so that transformers and what is built on it
    cut text as `load_tokenizer` does.

    By itself AutoTokenizer goes by the model's type: beside a config.json that says qwen2 it takes
    Qwen2's way of cutting text, whatever tokenizer_config.json says and tokenizer.json holds::

        " 15"    tokenizer.json of the tiny models    " 1", "5"
                 Qwen2's                              " ", "1", "5"

    It does not where tokenizer_config.json names a class of the folder's own (auto_map): then it
    takes tokenizer.json as it is, with ``trust_remote_code=True`` through that class, which is two
    lines (`d2f.tokenization_d2f`), and without it through its own.
    """
    tokenizer.save_pretrained(folder)
    if type(tokenizer) is not TokenizersBackend:  # of a class that is found by its name
        return
    settings = folder / "tokenizer_config.json"
    values = read_object(settings, CheckpointError)
    values.pop("auto_map", None)  # of the folder that it came from, whose code is not here
    write_json(settings, values)
    if type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)) is TokenizersBackend:
        return
    write_json(settings, values | {"auto_map": OWN_CLASS})
    shutil.copy(CODE, folder)


def write_json(path: Path, values: Mapping[str, object]) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


# Chat messages.


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
