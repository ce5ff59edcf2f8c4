"""lm-eval's cache of responses (--use_cache), kept to the settings that made it.

Its keys are prompts and generation_kwargs alone: another model, decoder or threshold would find the
answers of the last one. So what made the answers is kept in it, too.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from d2f.errors import InputError

KEY = "d2f settings"


def claim(cache: MutableMapping[str, Any], settings: dict[str, Any], place: str) -> None:
    """Mark an empty cache with the settings. Raises InputError for one that has answers of others,
    or of nobody knows what."""
    there = cache.get(KEY)
    if there == settings:
        return
    if there is None and not len(cache):
        cache[KEY] = settings
        return
    if there is None:
        raise InputError(
            f"{place} has answers of other software: expected an empty cache, or our own"
        )
    differ = [
        f"{name} {there.get(name)!r}, not {settings.get(name)!r}"
        for name in sorted(there.keys() | settings.keys())
        if there.get(name) != settings.get(name)
    ]
    raise InputError(f"{place} has answers of other settings: {'; '.join(differ)}")
