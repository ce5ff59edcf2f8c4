"""Save a tokenizer so that `AutoTokenizer` reads it back as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend

from d2f import tokenization_d2f
from d2f.errors import CheckpointError
from d2f.json_file import read_object

CODE = Path(tokenization_d2f.__file__)
OWN_CLASS = {"AutoTokenizer": [None, f"{CODE.stem}.{tokenization_d2f.D2FTokenizer.__name__}"]}


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer into a model's `folder`, its config.json included, so that transformers and
    what is built on it cut text as `d2f.load_tokenizer` does.

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
    _write(settings, values)
    if type(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)) is TokenizersBackend:
        return
    _write(settings, values | {"auto_map": OWN_CLASS})
    shutil.copy(CODE, folder)


def _write(path: Path, values: dict[str, object]) -> None:
    text = json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")
