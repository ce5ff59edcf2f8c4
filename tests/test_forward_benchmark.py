"""The benchmark of a forward runs and accounts for the parts; how fast is not for a test."""

from __future__ import annotations

import pytest

from benchmarks import forward


@pytest.mark.parametrize("model", ["tiny-d2f", "tiny-ar"])
def test_each_batch_size_is_a_line_whose_parts_are_within_the_whole(model, capsys):
    arguments = ["--model", model, "--task", "sudoku", "--problems", "2", "--batch-sizes", "1", "2"]
    forward.main(arguments)
    about, header, *lines = capsys.readouterr().out.splitlines()
    assert about.startswith(f"{model} on sudoku, 2 problems; ")
    columns = header.split()
    rows = [dict(zip(columns, map(float, line.split()), strict=True)) for line in lines]
    assert [row["batch"] for row in rows] == [1, 2]
    assert rows[1]["forwards"] < rows[0]["forwards"], "two problems share a forward"
    assert all(row[part] > 0 for row in rows for part in forward.PARTS)
    assert all(row["model"] <= row["forward"] for row in rows)


def test_the_profile_names_operators(capsys):
    forward.main(["--task", "sudoku", "--problems", "1", "--batch-sizes", "1", "--profile"])
    assert "aten::addmm" in capsys.readouterr().out
