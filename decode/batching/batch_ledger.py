"""The ledger of a batch job: its run, then a line a row as it is answered.

{"run": {"model": "tiny-d2f", "input": "5d41...", "rows": 3}}
{"row": 1, "text": "7", "tokens": [23, 8], "forwards": 2, ...}
{"row": 0, "error": "expected prompt, got the keys promt"}
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from d2f.data_records import JsonLines
from d2f.json_file import parse
from decode.batching.batch_rows import Answer
from decode.reporting.ledger import Ledger, json_line

_ANSWER = TypeAdapter(Answer)


class BatchLedger(Ledger[int, Answer]):
    """The rows that are answered. In memory are their counts alone, not what they say."""

    FILE = "exists and is not a ledger of this command"
    ENTRY = "an answer of this run"

    def key(self, entry: Answer) -> int:
        return entry.row

    def kept(self, entry: Answer) -> Answer:
        return replace(entry, text=None, tokens=())

    def line(self, entry: Answer) -> str:
        return json_line(asdict(entry))

    def parsed(self, line: bytes, where: str) -> Answer:
        values = parse(line, nan=True)
        if not isinstance(values, dict) or set(values) != set(Answer.__dataclass_fields__):
            raise ValueError("not the keys of an answer")
        answer = _ANSWER.validate_json(line, strict=True)
        if not 0 <= answer.row < self.run["rows"]:
            raise ValueError("no row of this run")
        return answer

    def answers(self) -> Iterator[Answer]:
        """Every answer, whole, in the order of the rows."""
        lines = JsonLines(Path(self.path))
        # The first line is the run's.
        places = {lines.record(place)["row"]: place for place in range(1, len(lines))}
        for row in sorted(places):
            yield _ANSWER.validate_json(json.dumps(lines.record(places[row])), strict=True)
