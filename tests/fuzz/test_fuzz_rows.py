"""Whatever a line of a JSONL file holds, it is trained on, named, or skipped and counted."""

from __future__ import annotations

import json

import pytest
from data_rows import stream, texts
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.odd import LEAVES, TEXT, VALUES, damaged
from tests.fuzz.outcome import attempt, budget

GOOD = ['{"prompt": "2+3?", "response": "5"}', '{"prompt": "1+1?", "response": "2"}']
WHOLE = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
KEYS = st.sampled_from(["prompt", "response", "messages", "role", "content", "system"]) | TEXT
MESSAGES = st.lists(st.dictionaries(KEYS, LEAVES, max_size=3) | VALUES, max_size=3)
ROWS = (
    st.dictionaries(KEYS, VALUES | TEXT, max_size=4)
    | st.fixed_dictionaries({"prompt": TEXT, "response": TEXT})
    | st.fixed_dictionaries({"messages": MESSAGES})
    | VALUES
).map(json.dumps)
LINES = (
    ROWS.map(str.encode)
    | damaged(GOOD[0]).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | damaged(WHOLE).map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.binary(max_size=60)
    | st.sampled_from([b"[" * 50_000, b'{"a":' * 50_000, b'{"prompt": ' + b"1" * 5000 + b"}"])
).map(lambda line: line.replace(b"\n", b" "))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "d.jsonl"


@budget(2)
@given(LINES, st.sampled_from([0, 10]))
def test_any_line(file, line, measured):
    """A bad line takes none of the others with it, and is counted where it is skipped."""
    file.write_bytes(b"\n".join([GOOD[0].encode(), line, GOOD[1].encode()]) + b"\n")
    options = {"file": str(file), "on_long": "drop", "measure_rows": measured}
    attempt(lambda: texts(stream(**options)))
    left = attempt(lambda: stream(on_bad_row="skip", **options))
    assert left is not None
    found = attempt(lambda: texts(left))
    assert found is not None
    for prompt, response in (("2+3?", "5"), ("1+1?", "2")):
        assert (f"<|user|>{prompt}<|assistant|>", f"{response}<|endoftext|>") in found
    assert len(left.screen) == 2 + bool(line.strip())
