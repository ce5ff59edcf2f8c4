"""What hides one of the toolkit's packages is named, whichever of them it hides."""

from __future__ import annotations

import pytest

from d2f.command import HiddenPackageError, require


def test_one_that_is_not_there_keeps_none_after_it_from_being_looked_at(monkeypatch, tmp_path):
    (tmp_path / "hidden_by_a_file.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    require("distill", "no_package_of_this_name")
    with pytest.raises(HiddenPackageError, match=r"hidden_by_a_file\.py hides the package"):
        require("no_package_of_this_name", "hidden_by_a_file")
