"""Read a checkpoint's tokenizer, as it cuts text and without its own code."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from d2f.errors import CheckpointError
from d2f.families import FAMILIES
from d2f.json_file import read_object
from d2f.lfs_pointer import refuse_pointer

# Classes that are nothing but tokenizer.json.
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(place: str) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, None where it has none or one without a vocabulary, which makes
    no token of any text; its own code is never run. Raises CheckpointError where it cannot be read
    without."""
    folder = Path(place)
    if not any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        if _has_no_vocabulary(folder):
            return None
        tokenizer = _read_tokenizer(folder)
        return tokenizer if tokenizer.get_vocab().keys() - tokenizer.get_added_vocab() else None
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever comes
        for path in sorted(folder.glob("*.json")):
            refuse_pointer(path, CheckpointError)
        raise CheckpointError(f"{place}: its tokenizer cannot be read: {error}") from error


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    if _is_generic(folder):
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (KeyError, ValueError, OSError):
        # Its class is code of the checkpoint's, which is not run: Dream's is Qwen2's tokenizer.
        for kind in {family.tokenizer for family in FAMILIES.values()} - {None}:
            if (folder / kind.vocab_files_names["vocab_file"]).is_file():
                return kind.from_pretrained(folder, trust_remote_code=False)
        raise


def _has_no_vocabulary(folder: Path) -> bool:
    """Whether there are settings of a generic tokenizer alone."""
    settings = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file():
        return False
    return read_object(settings, CheckpointError).get("tokenizer_class") in _GENERIC


def _is_generic(folder: Path) -> bool:
    """Whether tokenizer.json is all there is to the tokenizer. AutoTokenizer would go by the
    model's type instead and cut text as that model's own tokenizer does."""
    settings = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").is_file():
        return False
    kind = read_object(settings, CheckpointError) if settings.is_file() else {}
    return kind.get("tokenizer_class") in (None, *_GENERIC)
