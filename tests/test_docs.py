"""The commands of docs/from-autoregressive.md run one after another; the links of docs lead on."""

from __future__ import annotations

import json
import re

import pytest
from documents import ROOT, run

import d2f
from benchmarks.tables import BLOCKS, with_block

PAGE = (ROOT / "docs" / "from-autoregressive.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_way_from_an_autoregressive_checkpoint_runs(tmp_path):
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    smaller = {
        "accelerate launch": "--steps 1 --data.rows 1",
        "python -m decode.pipeline": "--problems 1 --tasks sudoku",
    }
    for command in block.splitlines():
        out = run(command, tmp_path, smaller)
    assert "tokens/forward" in out
    made = {name: tmp_path / "runs" / "from-ar" / name for name in ("start", "teacher", "student")}
    assert d2f.load(made["start"], device="meta").contract.objective == "next_token"
    teacher = d2f.load(made["teacher"] / "model", device="meta")
    assert (teacher.family, teacher.contract.objective) == ("dream", "masked_diffusion")
    assert d2f.load(made["student"] / "model", device="meta").contract.objective == "d2f"


@pytest.mark.slow
def test_the_way_to_a_scored_checkpoint_runs(tmp_path):
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    found = {
        kind: re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1]
        for kind in ("bash", "yaml", "json")
    }
    row = json.loads(found["json"])
    rows = [
        row | {"question": row["question"].replace("3", str(n)), "answer": str(n + 4)}
        for n in range(1, 30)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_task.yaml").write_text(found["yaml"])
    said = [run(command, tmp_path) for command in found["bash"].splitlines()]
    assert "of 20 right" in said[0] and "of 29 right" in said[1]
    assert all("pass@4" in text for text in said[3:])
    for folder in ("sums", "sums-sampled"):
        assert (tmp_path / "runs" / folder / "report.json").is_file()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_generated_table_is_up_to_date(name):
    place, make = BLOCKS[name]
    text = (ROOT / place).read_text(encoding="utf-8")
    assert with_block(text, name, make()) == text, "run `python -m benchmarks.tables`"


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


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "README.md"])
def test_the_files_that_a_page_names_are_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folders = "d2f|decode|distill|triton_kernels|benchmarks|configs|tests|docs"
    named = set(re.findall(rf"(?<![\w/.])(?:{folders})/[\w/-]*(?:\.\w+)?", text))
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
