"""What the documents say is so: commands run or at least have these flags, links lead somewhere,
generated tables are up to date, the site builds."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from documents import ROOT, printed, run

import d2f
from benchmarks.reference_page import options_by_name
from benchmarks.tables import BLOCKS, with_block
from d2f.command import COMMANDS
from decode.decoders import DECODERS

PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NAME = {"ids": lambda page: page.name}


def fenced(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_way_from_an_autoregressive_checkpoint_runs(tmp_path):
    (block,) = (b for b in fenced("docs/training.md", "bash") if "d2f convert" in b)
    smaller = {
        "d2f train": "--steps 1 --data.rows 1",
        "d2f decode": "--problems 1 --tasks sudoku",
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
    page = "docs/evaluation.md"
    row = json.loads(fenced(page, "json")[0])
    rows = [
        row | {"question": row["question"].replace("3", str(n)), "answer": str(n + 4)}
        for n in range(1, 30)
    ]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "my_task.yaml").write_text(fenced(page, "yaml")[0])
    said = [run(command, tmp_path) for command in fenced(page, "bash")[0].splitlines()]
    assert "of 20 right" in said[0] and "of 29 right" in said[1]
    assert all("pass@4" in text for text in said[3:])
    for folder in ("sums", "sums-sampled"):
        assert (tmp_path / "runs" / folder / "report.json").is_file()


@pytest.mark.slow
def test_the_python_of_the_quickstart_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for program in fenced("docs/quickstart.md", "python"):
        exec(program, {})


@cache
def known_flags(command: str) -> set[str]:
    """The flags of a command's --help, and those of every decoder."""
    text = printed([COMMANDS[command][0], "--help"])
    return {*re.findall(r"--[\w-]+", text), *FLAGS_OF_DECODERS}


FLAGS_OF_DECODERS = {f"--{name.replace('_', '-')}" for name in options_by_name(DECODERS.values())}
KEYS = ("train", "compare", "data", "lm-eval")  # take keys of a file, or lm-eval's own


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_the_commands_of_a_page_exist_and_have_these_flags(page):
    text = page.read_text(encoding="utf-8")
    blocks = "".join(re.findall(r"```(?:bash|text)?\n(.*?)```", text, re.DOTALL))
    for line in blocks.replace("\\\n", " ").splitlines():
        if not line.startswith("d2f ") or "COMMAND" in line:
            continue
        words = shlex.split(line, comments=True)
        assert words[1] in COMMANDS, line
        if words[1] not in KEYS:
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            of_own = any(":" in word for word in words)  # a decoder of one's own brings flags
            wrong = set() if of_own else flags - known_flags(words[1])
            assert not wrong, line


@pytest.mark.parametrize("name", BLOCKS)
def test_a_generated_table_is_up_to_date(name):
    place, make = BLOCKS[name]
    text = (ROOT / place).read_text(encoding="utf-8")
    assert with_block(text, name, make()) == text, "run `python -m benchmarks.tables`"


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_links_lead_to_a_file_and_a_heading(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"(?:\]\(|src=\"|srcset=\")([^)\"\s]+)", text):
        if "://" in target:
            continue
        name, _, heading = target.partition("#")
        place = page.parent / name if name else page
        assert place.is_file(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles]
            assert heading in anchors, target


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_the_files_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- measured -->.*<!-- /measured -->", "", text, flags=re.DOTALL)  # as it was
    folders = "d2f|decode|distill|triton_kernels|benchmarks|configs|tests|docs|examples"
    ending = r"(?:\.(?:py|md|yaml|cpp|json|webp|ipynb))?"
    named = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w/-]*{ending}", text))
    named = {name for name in named if "NAME" not in name}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", PAGES, **NAME)
def test_a_figure_with_a_dark_one_beside_it_shows_that_on_a_dark_page(page):
    """GitHub and the site both follow the reader's setting."""
    text = page.read_text(encoding="utf-8")
    for light in re.findall(r"(?:!\[[^\]]*\]\(|<img src=\")([^)\"]+)", text):
        place = Path(light)
        dark = place.with_name(f"{place.stem}-dark{place.suffix}")
        if (page.parent / dark).is_file():
            assert f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">' in text


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.glob("*/index.html"):
        figures = re.findall(r'(?:src|srcset)="(\.\./benchmarks/[^"]+)"', page.read_text("utf-8"))
        assert all((page.parent / figure).is_file() for figure in figures), figures
