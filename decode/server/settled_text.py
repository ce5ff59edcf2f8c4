"""Stand-in: text of what is settled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decode.engine.result import Result


class SettledText:
    """Gives text only at the end."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], end_ids: Sequence[int]):
        self._sent = ""

    def add(self, settled: Sequence[int]) -> str:
        return ""

    def finish(self, result: Result) -> str:
        return result.text or ""
