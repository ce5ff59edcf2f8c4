"""The kernels' benchmarks run where there is no GPU, and the kernels compile for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = {
    "masked_kl": "--rows 3 --vocabularies 300 --width 8 --repeat 1",
    "confidence": "--rows 1 3 --vocabularies 300 --width 8 --repeat 1",
    "span_attention": "--rows 4 --cached 16 --lengths 8 --repeat 1",
}


def run(module: str, *arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"benchmarks.{module}", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", SMALL)
def test_a_benchmark_writes_what_it_prints(module, tmp_path):
    path = tmp_path / "out.json"
    out = run(module, *SMALL[module].split(), "--json", str(path))
    measured = json.loads(path.read_text())["measured"]
    assert measured and len(out.splitlines()) > len(measured) / 2


def test_a_kernel_compiles_for_a_gpu_that_is_not_here():
    out = run("compiled_kernels", "--only", "28 heads over 4", "--dtypes", "bfloat16")
    lines = [line.split(maxsplit=4) for line in out.splitlines()[2:]]
    assert len(lines) == 5
    assert all(
        int(shared) <= 227 * 1024 and int(spilled) < 256 for _, shared, _, spilled, _ in lines
    )
