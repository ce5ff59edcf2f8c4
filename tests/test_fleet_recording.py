"""What the simulation is fed with: fitted forward times, recordings, a GPU's floor."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import random_model

import d2f
import decode
from benchmarks.fleet.fleet_flags import GPUS as GPU_FLAGS
from benchmarks.fleet.fleet_flags import WAYS as WAY_FLAGS
from benchmarks.fleet.floor import floor
from benchmarks.fleet.forward_time import NS, ForwardTime, fitted, read_time
from benchmarks.fleet.record_way import WAYS, Way, decode_together, record
from benchmarks.fleet.recording import Recording
from benchmarks.model_size import GPUS, size_of
from d2f.errors import InputError

KNOTS = (1, 2, 4, 8, 16, 20)


def said(time, forwards):
    """Milliseconds that `time` says of forwards: rows, cached slots, requests."""
    by_rows = time.by_rows(64)
    return np.array(
        [
            by_rows[int(rows)] / NS + time.cached_ms * cached + time.request_ms * requests
            for rows, cached, requests in forwards
        ]
    )


def drawn_forwards(seed, count=300):
    draw = np.random.default_rng(seed)
    columns = [draw.integers(low, high, count) for low, high in ((1, 21), (0, 400), (1, 5))]
    columns[0][:2] = 1, 20  # the ends
    return np.stack(columns, axis=1)


@given(
    st.lists(st.sampled_from((0.0, 0.1, 0.7)), min_size=5, max_size=5),
    st.sampled_from((0.0, 0.2)),
    st.sampled_from((0.0, 0.003)),
)
def test_a_time_that_is_one_is_found_again(slopes, request_ms, cached_ms):
    heights = np.cumsum(
        [0.5, *(s * (b - a) for s, a, b in zip(slopes, KNOTS, KNOTS[1:], strict=False))]
    )
    true = ForwardTime(
        kind="measured",
        points=tuple(zip(KNOTS, heights.tolist(), strict=True)),
        request_ms=request_ms,
        cached_ms=cached_ms,
    )
    forwards = drawn_forwards(0)
    ms = said(true, forwards)
    found = fitted(np.column_stack([forwards, ms]))
    np.testing.assert_allclose(said(found, forwards), ms, atol=1e-5)  # nanoseconds are whole


@given(st.integers(0, 1000))
def test_whatever_was_measured_more_work_never_takes_less_and_the_mean_stays(seed):
    """Also of times that have nothing to do with the work."""
    forwards = drawn_forwards(seed)
    ms = np.random.default_rng(seed).exponential(2.0, len(forwards)) + 1.0
    found = fitted(np.column_stack([forwards, ms]))
    found.check("the fit")
    assert found.by_rows(99) == sorted(found.by_rows(99))
    assert found.request_ms >= 0 and found.cached_ms >= 0
    assert said(found, forwards).mean() == pytest.approx(ms.mean(), rel=1e-4)


def test_times_between_and_beyond_the_points():
    time = ForwardTime(kind="measured", points=((2, 1.0), (4, 3.0)))
    assert time.by_rows(5) == [1_000_000, 1_000_000, 1_000_000, 2_000_000, 3_000_000, 4_000_000]
    assert ForwardTime(kind="measured", points=((2, 1.0),)).by_rows(3) == [1_000_000] * 4


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"kind": "measured", "points": [[4, 1.0], [2, 2.0]]}, r"rows from 1 on that grow.*4, 2"),
        ({"kind": "measured", "points": []}, "rows from 1 on"),
        ({"kind": "measured", "points": [[1, 2.0], [2, 1.0]]}, "never fall"),
        ({"kind": "measured", "points": [[1, 2.0]], "request_ms": -1.0}, "never fall"),
        ({"kind": "measured", "points": [[1, 0.0], [2, 1.0]]}, "times above 0"),
        ({"kind": "guess", "points": [[1, 2.0]]}, "kind: expected 'measured'"),
        ({"kind": "measured", "points": [[1, "x"]]}, "points.0.1: expected a number, got 'x'"),
        ({"1": {"rows": 2}}, "benchmarks.forward --json"),
        ({"1": 3}, "benchmarks.forward --json"),
    ],
)
def test_a_file_of_times_that_is_none_is_refused(content, says, tmp_path):
    path = tmp_path / "time.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=says) as error:
        read_time(path)
    assert str(path) in str(error.value)


def test_both_kinds_of_files_of_times_are_read(tmp_path):
    path = tmp_path / "time.json"
    path.write_text('{"1": {"rows": 8.0, "forward": 2.0}, "4": {"rows": 31.5, "forward": 5.0}}')
    assert read_time(path).points == ((8, 2.0), (32, 5.0))
    own = ForwardTime(kind="estimated floor", points=((1, 2.0),), cached_ms=0.1)
    path.write_text(own.model_dump_json())
    assert read_time(path) == own


@pytest.mark.parametrize("gpu", GPUS)
def test_the_floor_is_the_arithmetic_of_the_sizes(gpu):
    size, time = size_of("small"), floor("small", gpu)
    by_rows = time.by_rows(2000)
    # Of the rows from which arithmetic is longer the next whole number is taken.
    slack = 1e3 * size.flops(1) / GPUS[gpu].flops
    for rows in (1, 40, 150, 300, 700, 2000):
        assert abs(by_rows[rows] / NS - size.floor_ms(GPUS[gpu], rows)) < slack + 1e-6
    more = size.floor_ms(GPUS[gpu], 1, 5000) - size.floor_ms(GPUS[gpu], 1)
    assert time.cached_ms * 5000 == pytest.approx(more)


def test_a_way_is_recorded_saved_and_read(tmp_path):
    """An autoregressive request: its prompt, then a row a token; each shows one more."""
    way = Way("autoregressive", "tiny-ar")
    found, means = record(way, "story", 3, 2, compiled=False)
    assert [size for size, _, _ in means] == [1, 2]
    assert found.options == {"decoder": "autoregressive"} and found.time.kind == "measured"
    for trace in found.traces:
        rows, cached, visible = zip(*trace.forwards, strict=True)
        assert rows == (len(trace.prompt), *[1] * (len(rows) - 1))
        assert cached == (0, *(len(trace.prompt) + n for n in range(len(rows) - 1)))
        assert visible[:-1] == tuple(range(1, len(rows)))
        assert (trace.first, trace.tokens) == (0, visible[-1])
    # The end token is made and not shown.
    model = d2f.load("tiny-ar")
    decoder = decode.Autoregressive(found.max_new_tokens)
    results = decode.generate(model, [list(t.prompt) for t in found.traces], decoder)
    assert [trace.tokens for trace in found.traces] == [len(result.tokens) for result in results]
    assert f"3 held-out story problems, {sum(t.right for t in found.traces)} right" in found.summary
    found.save(tmp_path / "r.json")
    assert Recording.load(tmp_path / "r.json") == found
    assert (tmp_path / "r.json").stat().st_size < 20_000


def test_what_is_measured_is_all_that_a_forward_feeds():
    """Three requests, two at a time: each of their calls is in one forward."""
    decoder = decode.D2F(block_size=4, max_new_tokens=8)
    prompts = [[5, 6, 7], [8, 9], [10] * 6]
    requests, shown, measured = decode_together(random_model("llada"), prompts, decoder, 2)
    calls = [call for request in requests for call in request.calls]
    rows, cached, counts, ms = (sum(column) for column in zip(*measured, strict=True))
    assert (rows, cached) == tuple(map(sum, zip(*calls, strict=True)))
    assert counts == len(calls) > len(measured) and ms > 0
    assert [len(own) for own in shown] == [len(request.calls) for request in requests]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("traces", [], "traces: expected at least 1 of them"),
        ("time", {"kind": "measured", "points": [[2, 2.0], [4, 1.0]]}, "time: expected times"),
        ("extra", 1, "extra: there is no such key"),
    ],
)
def test_a_recording_that_is_none_is_refused(key, value, says, tmp_path):
    trace = {"prompt": [1], "text": "", "right": True, "forwards": [[1, 0, 1]]}
    values = {
        "name": "D2F", "model": "m", "options": {}, "max_new_tokens": 8, "about": {},
        "time": {"kind": "measured", "points": [[1, 1.0]]}, "traces": [trace],
    }  # fmt: skip
    path = tmp_path / "r.json"
    path.write_text(json.dumps(values))
    assert Recording.load(path).traces[0].first == 0
    path.write_text(json.dumps(values | {key: value}))
    with pytest.raises(InputError, match=says) as error:
        Recording.load(path)
    assert str(path) in str(error.value)
    no_rows = values | {"traces": [trace | {"forwards": [[0, 0, 1]]}]}
    path.write_text(json.dumps(no_rows))
    with pytest.raises(InputError, match="at least 1 row"):
        Recording.load(path)


def test_the_flags_name_what_there_is():
    assert tuple(GPUS) == GPU_FLAGS
    assert tuple(way.name for way in WAYS) == WAY_FLAGS
