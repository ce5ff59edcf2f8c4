"""The figure of accuracy against speed."""

from decode.plots import Panel, Point, Series, frontier, legend_above, new_figure, save


def panels():
    """Eight close points with labels, others behind them, and a panel with a single point."""
    front = [
        Point(100 + 3 * i, 0.9 - 0.01 * i, 0.85 - 0.01 * i, 0.94 - 0.01 * i, label=f"conf 0.{i}")
        for i in range(8)
    ]
    front[3] = Point(109, 0.87, 0.82, 0.91, label="conf 0.3", chosen=True)
    behind = [Point(95 + 2 * i, 0.7, 0.6, 0.8) for i in range(9)]
    alone = Point(50, 1.0, 0.8, 1.0 - 1e-16, label="held-out", slowest=45, fastest=60)
    return [
        Panel("story", [Series("front", front, line=True), Series("other", behind, light=True)]),
        Panel("sudoku", [Series("one", [alone]), Series("none", [])], bound=(0.9, "to reach")),
    ]


def test_the_same_points_give_the_same_files(tmp_path):
    for name in ("a", "b"):
        written = save(frontier(panels(), "what was measured"), tmp_path / name)
        assert [path.name for path in written] == [f"{name}.png", f"{name}.svg"]
    for suffix in (".png", ".svg"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 4
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()


def test_what_is_in_it():
    figure = frontier(panels(), "what was measured")
    left, right = figure.axes
    assert left.get_xlabel() == "speed, visible tokens per second"
    assert left.get_ylabel() == "accuracy, % of problems right"
    assert figure.get_supxlabel() == "what was measured"
    names = [text.get_text() for text in left.get_legend().get_texts()]
    assert names == ["chosen", "front", "other"]
    assert {text.get_text() for text in right.get_legend().get_texts()} == {"to reach", "one"}
    assert [text.get_text() for text in right.texts] == ["held-out"]


def test_rows():
    figure = frontier([*panels(), *panels()], "what was measured", columns=2)
    tops = [round(axes.get_window_extent().y1) for axes in figure.axes]
    assert tops[0] == tops[1] > tops[2] == tops[3]
    assert [axes.get_title() for axes in figure.axes] == ["story", "sudoku"] * 2


def test_labels_do_not_cover_each_other_and_stay_inside():
    figure = frontier(panels(), "what was measured")
    for axes in figure.axes:
        inside = axes.get_window_extent()
        boxes = [label.get_window_extent() for label in axes.texts]
        for i, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[:i])
            assert inside.x0 - 1 <= box.x0 and box.x1 <= inside.x1 + 1


def test_a_legend_above_has_the_columns_that_fit():
    names = [f"an entry with a long name {i}" for i in range(9)]
    rows = {}
    for panels in (1, 3):
        figure, axes = new_figure(panels, "what was measured", inches=(5.6, 4.6))
        for name in names:
            axes[0].plot([1, 2], [3, 4], label=name)
        legend_above(figure, axes[0])
        (legend,) = figure.legends
        figure.draw_without_rendering()
        inside, texts = figure.bbox, [text.get_window_extent() for text in legend.get_texts()]
        assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in texts)
        rows[panels] = len({round(box.y0) for box in texts})
    assert rows[1] > rows[3] == 3
