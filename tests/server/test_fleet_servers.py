"""`python -m benchmarks.fleet --check` against the real server."""

from __future__ import annotations

import json

from serving import listening, stock

from benchmarks.fleet.__main__ import main
from benchmarks.fleet.record_way import WAYS, record
from decode.server.app import create_app


def test_the_server_answers_as_was_recorded(tiny_d2f, tmp_path):
    """Under load, too: the answers are compared to the letter. The times are for no test."""
    (way,) = (way for way in WAYS if way.name == "D2F")
    recording, _ = record(way, "story", 6, 4, compiled=False)
    recording.save(tmp_path / "d2f.json")
    few = ("--ways", "D2F", "--light", "4", "--loads", "0.5", "--seconds", "1", "--max-batch", "4")
    with listening(create_app([stock("tiny-d2f", tiny_d2f, batch_size=4)])) as address:
        assert main(["--folder", str(tmp_path), "--check", address, *few]) == 0
    found = json.loads((tmp_path / "check-d2f.json").read_text())
    assert [row["load"] for row in found["loads"]] == ["one at a time", "0.5"]
    assert all(row["requests"] >= 3 for row in found["loads"])
