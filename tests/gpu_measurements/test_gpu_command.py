"""python -m benchmarks.gpu: what it starts, and its tables."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import compare_entries, page
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.bring_up import MEASUREMENTS, PARTS
from benchmarks.tables import with_block

ROOT = Path(__file__).parents[2]
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
RUN = {
    "facts": {"device": "a GPU", "torch": "2", "code": "1", "dry_run": False},
    "measured": {
        "steps": {
            "state": "done", "why": "", "command": ["benchmarks.x", "--rows", "3"],
            "date": "2026-01-02", "commit": None, "seconds": 12.5,
            "warnings": ["no CUDA graph | of it"],
            "found": {"dtype": "bfloat16",
                      "measured": [{"rows": 3, "ms": 1.23456}, {"rows": 4, "tokens": 12345.6}],
                      "kernels": [{"kernel": "a", "ms": None}]},
            "output": "",
        },
        "ways": {
            "state": "cut", "why": "the time was over", "command": ["benchmarks.y"],
            "date": "2026-01-03", "commit": "abc-dirty", "seconds": 9, "warnings": [],
            "found": {"measured": {"plain": None, "ours": {"ms": 0.5}}}, "output": "",
        },
    },
}  # fmt: skip
TABLES = """\
**a GPU, 2026-01-02 and 2026-01-03**

torch 2, code 1, commit abc-dirty.

| measured | state | seconds | warned of |
|---|---|---|---|
| steps | done | 12.5 | no CUDA graph / of it |
| ways | cut: the time was over | 9 |  |

steps: `python -m benchmarks.x --rows 3` **With a fallback: no CUDA graph / of it.**

| rows | ms | tokens |
|---|---|---|
| 3 | 1.235 |  |
| 4 |  | 12,346 |

| kernel | ms |
|---|---|
| a | - |

ways (cut: what there is of it): `python -m benchmarks.y`

|  | ms |
|---|---|
| plain: no memory |  |
| ours | 0.5 |
"""


def test_the_tables_of_a_file_need_neither_a_gpu_nor_torch(tmp_path):
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"runs": [RUN]}))
    code = f"import sys; from benchmarks.gpu.__main__ import main; main(['--table', {str(path)!r}])"
    loaded = "; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code + loaded], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == TABLES + "False\n"


@on_a_cpu
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "new" / "gpu.json")]) == 2
    assert capsys.readouterr().err.startswith("error: expected an NVIDIA GPU, torch finds none")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "error: expected --output FILE"),
        (["--minutes", "0"], "expected minutes above 0, got 0"),
        (["--minutes", "nan"], "expected minutes above 0, got nan"),
        (["--only", "all"], "invalid choice: 'all'"),
        (["--table", "no.json"], "error: no.json: expected a file that"),
    ],
)
def test_a_bad_command_line_is_one_line(given, said, capsys):
    assert main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


class ParsedError(Exception):
    """A command line was read, and nothing else is to be done."""


COMMANDS = [(found, dry) for found in MEASUREMENTS for dry in {False, bool(found.small)}]


@pytest.mark.parametrize(("found", "dry"), COMMANDS, ids=lambda x: getattr(x, "name", x))
def test_the_commands_are_those_of_the_modules(found, dry, monkeypatch):
    def parsed(self, *arguments, **others):
        parse(self, *arguments, **others)
        raise ParsedError

    parse = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    name, *arguments = found.words(dry=dry)
    with pytest.raises(ParsedError):
        importlib.import_module(name).main([*arguments, "--json", "x.json"])


def test_every_part_is_measured_in_its_order_and_a_dry_run_has_every_module():
    assert list(dict.fromkeys(found.part for found in MEASUREMENTS)) == list(PARTS)
    assert len({found.name for found in MEASUREMENTS}) == len(MEASUREMENTS)
    modules = {found.command.split()[0] for found in MEASUREMENTS if found.part != "correctness"}
    assert modules == {found.command.split()[0] for found in MEASUREMENTS if found.small}


@pytest.mark.parametrize("python", [None, "py"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_comparison_is_a_valid_configuration(python, device, tmp_path):
    """Without vLLM its entries are left out; what is left is still read."""
    from decode.compare.config import read_config

    given = compare_entries.flags(tmp_path, device, python)
    config = read_config(given[1], given[2:])
    kinds = [entry.kind for entry in config.entries]
    assert ("vllm" in kinds) == (python is not None and device == "cuda")
    assert config.reference.kind == ("vllm" if python and device == "cuda" else "ours")
    assert {e.device for e in config.entries if e.kind != "vllm"} == {device}
    assert all(not e.env for e in config.entries if e.kind == "vllm"), "that is for CPUs"


def test_tests_are_counted_by_file(tmp_path):
    path, test = tmp_path / "found.json", tmp_path / "test_it.py"
    test.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n"
        "@pytest.mark.skip\ndef test_c(): pass\n"
        "@pytest.fixture\ndef f(): 1 / 0\ndef test_d(f): pass\n"
    )
    (tmp_path / "test_broken.py").write_text("import no_such_module")
    # A process of its own: pytest in pytest would share its plugins.
    code = (
        "from pathlib import Path; from benchmarks.gpu import native_tests as n; "
        f"n.ROOT = Path({str(tmp_path)!r}); n.chosen = lambda which: ['-c', '/dev/null', "
        f"'--continue-on-collection-errors', {str(tmp_path)!r}]; "
        f"raise SystemExit(n.main(['kernels', '--json', {str(path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["measured"] == [
        {"file": "test_broken.py", "passed": 0, "failed": 1, "skipped": 0},
        {"file": "test_it.py", "passed": 1, "failed": 2, "skipped": 1},
    ]
    assert [row["failed"] for row in found["failed"]] == [
        "test_broken.py", "test_it.py::test_b", "test_it.py::test_d",
    ]  # fmt: skip


def test_the_page_says_what_was_measured_and_what_fits():
    text = page.PAGE.read_text(encoding="utf-8")
    for name, make in page.BLOCKS.items():
        assert with_block(text, name, make()) == text, "run `python -m benchmarks.gpu.page`"
