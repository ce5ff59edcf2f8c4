"""The commands of docs/from-autoregressive.md run one after another; the links of docs lead on."""

from __future__ import annotations

import re

import pytest
from documents import ROOT, in_small, run

import d2f

PAGE = (ROOT / "docs" / "from-autoregressive.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_way_from_an_autoregressive_checkpoint_runs(tmp_path):
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    smaller = {
        "accelerate launch": "--steps 1 --data.rows 1",
        "python -m decode.pipeline": "--problems 1 --tasks sudoku",
    }
    for command in block.splitlines():
        out = run(in_small(command, smaller), tmp_path)
    assert "tokens/forward" in out
    made = {name: tmp_path / "runs" / "from-ar" / name for name in ("start", "teacher", "student")}
    assert d2f.load(made["start"], device="meta").contract.objective == "next_token"
    teacher = d2f.load(made["teacher"] / "model", device="meta")
    assert (teacher.family, teacher.contract.objective) == ("dream", "masked_diffusion")
    assert d2f.load(made["student"] / "model", device="meta").contract.objective == "d2f"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        place = page.parent / name if name else page
        assert place.is_file(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
            assert heading in anchors, target
