"""The figures of accuracy against speed, and of speed against load."""

from decode.plots import Panel, Point, Series, draw, save


def panels():
    """Eight close points with labels, others behind them, and a panel with a single point."""
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


def test_the_same_points_give_the_same_files(tmp_path):
    for name in ("a", "b"):
        written = save(draw(panels(), "what was measured"), tmp_path / name)
        assert [path.name for path in written] == [f"{name}.png", f"{name}.svg"]
    for suffix in (".png", ".svg"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()


def test_what_is_in_it():
    figure = draw(panels(), "what was measured")
    left, right, load = figure.axes
    assert left.get_xlabel() == "speed, visible tokens per second"
    assert left.get_ylabel() == "accuracy, % of problems right"
    assert figure.get_supxlabel() == "what was measured"
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names == ["chosen", "front", "other"]
    assert {text.get_text() for text in right.get_legend().get_texts()} == {"to reach", "one"}
    assert [text.get_text() for text in right.texts] == ["held-out"]
    assert (load.get_xlabel(), load.get_ylabel(), load.get_xscale()) == (
        "in flight",
        "speed",
        "log",
    )
    assert [text.get_text() for text in load.get_xticklabels()] == ["1", "2", "4"]
    for axes in figure.axes:  # labels do not cover each other and stay inside
        inside = axes.get_window_extent()
        boxes = [label.get_window_extent() for label in axes.texts]
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
            assert inside.x0 - 1 <= box.x0 and box.x1 <= inside.x1 + 1


def test_rows():
    figure = draw([*panels()[:2], *panels()[:2]], "what was measured", columns=2)
    tops = [round(axes.get_window_extent().y1) for axes in figure.axes]
    assert tops[0] == tops[1] > tops[2] == tops[3]
    assert [axes.get_title() for axes in figure.axes] == ["story", "sudoku"] * 2
