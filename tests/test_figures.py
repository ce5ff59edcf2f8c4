"""The figures of accuracy against speed, and of speed against load."""

import json

import numpy as np
import pytest

from benchmarks.figures import COMPARISONS, RESULTS
from decode.plots import Panel, Point, Series, draw, save, styles_of


def panels():
    """Eight close points with labels, others behind them, a single point, and a load."""
    front = [
        Point(100 + 3 * i, 90 - i, 85 - i, 94 - i, label=f"conf 0.{i}", chosen=i == 3)
        for i in range(8)
    ]
    behind = [Point(95 + 2 * i, 70, 60, 80) for i in range(9)]
    alone = Point(50, 100, 80, 100 - 1e-14, label="held-out", left=45, right=60)
    load = [Point(2**i, 10.0 * i, 9.0 * i, 11.0 * i) for i in range(3)]
    return [
        Panel("story", [Series("front", front, line=True), Series("other", behind, light=True)]),
        Panel("sudoku", [Series("one", [alone]), Series("none", [])], bound=(90, "to reach")),
        Panel("load", [Series("a", load, line=True)], across="in flight", up="speed", log=True),
    ]


def test_the_same_points_give_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("decode.plots.DPI", 40)
    names = [f"{n}.{kind}" for n in ("a", "a-dark") for kind in ("png", "svg")]
    for folder in ("1", "2"):
        (tmp_path / folder).mkdir()
        written = save(panels()[:1], "what was measured", tmp_path / folder / "a")
        assert [path.name for path in written] == names
    first, second = ([(tmp_path / f / name).read_bytes() for name in names] for f in ("1", "2"))
    assert first == second and first[0] != first[2]
    assert b"<dc:date>" not in first[1]


def test_what_is_in_it():
    figure = draw([*panels(), panels()[0]], "what was measured", columns=2)
    left, right, load, last = figure.axes
    assert left.get_ylabel() == "right, %" and figure.get_suptitle() == "what was measured"
    columns = [{t.get_text() for t in axes.get_legend().get_texts()} for axes in (load, last)]
    assert columns == [{"chosen", "front", "other", "a"}, {"to reach", "one", "chosen", "front",
                                                          "other"}]  # fmt: skip
    assert [text.get_text() for text in right.texts] == ["held-out"]
    found = load.get_xlabel(), load.get_ylabel(), load.get_xscale()
    assert found == ("in flight", "speed", "log")
    assert [text.get_text() for text in load.get_xticklabels()] == ["1", "2", "4"]
    tops = [round(axes.get_window_extent().y1) for axes in figure.axes]
    assert tops[0] == tops[1] > tops[2] == tops[3]


@pytest.mark.parametrize("dark", [False, True])
def test_labels_cover_nothing(dark):
    """Ten entries that are close to each other: none of their labels is left out."""
    rng = np.random.default_rng(0)
    places = rng.uniform((0, 80), (4000, 99), (10, 2))
    entries = [
        Series(f"entry {i}", [Point(x, y, y - 4, y + 3, f"entry {i}", x - 80, x + 150)])
        for i, (x, y) in enumerate(places)
    ]
    figure = draw([Panel("story", entries)], "", dark=dark)
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 10 and axes.get_legend() is None
    inside = axes.get_window_extent()
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1
        for (point,) in (series.points for series in entries):
            ends = (point.x, point.low), (point.x, point.high), (point.left, point.y)
            a, b, c, d = axes.transData.transform([*ends, (point.right, point.y)])
            for start, end in ((a, b), (c, d)):
                line = start + np.linspace(0, 1, 500)[:, None] * (end - start)
                assert not ((box.min < line) & (line < box.max)).all(1).any()


def test_a_decoder_has_one_colour_in_all_figures():
    colors, plain = {}, ("vLLM", "vLLM one process", "D2F", "D2F surer", "autoregressive", "block")
    for name in COMPARISONS:
        about = json.loads((RESULTS / name / "summary.json").read_text())["about"]
        entries = list(
            dict.fromkeys(e.get("series") or e["name"] for e in about["config"]["entries"])
        )
        styles = styles_of(entries)
        if len(entries) <= 10:
            assert len({style.color for style in styles.values()}) == len(entries), name
        assert (
            len({(s.color, s.marker) for s in styles.values()}) == len(entries) or len(entries) > 20
        )
        for entry in set(entries) & set(plain):
            assert colors.setdefault(entry, styles[entry]) == styles[entry], (name, entry)
    assert set(colors) == set(plain)
    mixed = styles_of(["D2F one", "hf", "D2F", "remote", "D2F surer"])
    assert mixed["D2F"].color == "#d1242f" and len({s.color for s in mixed.values()}) == 5
