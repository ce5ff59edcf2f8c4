"""The kernels compile for GPUs that are not there, and keep their limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]


def compiled(path: Path, *arguments: str) -> dict[str, dict]:
    """What `benchmarks.compiled_kernels` says of each kernel in bf16, by its name; in a process of
    its own, without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiled_kernels"]
    given = ["--dtypes", "bfloat16", "--json", str(path), *arguments]
    done = subprocess.run([*command, *given], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    return {row["kernel"]: row for row in json.loads(path.read_text())["measured"]}


@pytest.mark.slow
def test_the_kernels_of_attention_keep_their_limits_on_an_h100(tmp_path):
    """Compiled as a launch does it, with the types and alignments of real arguments."""
    found = compiled(tmp_path / "k.json", "--only", "32 heads over 32", "28 heads over 4")
    forward = {name: row for name, row in found.items() if name.endswith("forward")}
    assert len(forward) == 15, "dimensions 64, 80, 96, 128 and Dream's heads; 16, 64 and 1,024 rows"
    triton_3_6 = tuple(map(int, triton.__version__.split(".")[:2])) == (3, 6)
    for name, row in found.items():
        spills = 8 * (triton_3_6 and "dimension 80, 64 rows: forward" in name)  # two registers
        assert row["spilled"] == spills, name
        assert row["shared"] <= 227 * 1024 and row["blocks"] >= 2, name
    for name, row in forward.items():
        multiplies = "mma" if "16 rows" in name else "wgmma"
        assert row["by"] == [multiplies, "cp.async"], name


def test_the_other_kernels_keep_their_limits_on_an_h100(tmp_path):
    names = {
        *("write slots: write", "masked KL: add_tile", "masked KL: difference"),
        *("confidence: logits_tile", "confidence: join_tiles"),
        *("confidence, sampled: logits_tile", "confidence, sampled: join_tiles"),
    }
    found = compiled(tmp_path / "k.json", "--only", "write slots", "confidence", "masked KL")
    assert set(found) == names
    assert not any(row["spilled"] for row in found.values())
    assert all(row["blocks"] >= 6 for row in found.values())


def test_a_smaller_gpu_gets_the_tile_that_fits(tmp_path):
    """As at a launch: a block of an RTX 4090 may take 99 KiB, the tile of an H100 takes 112."""
    only = ("--only", "32 heads over 32, dimension 128, 64 rows")
    found = compiled(tmp_path / "k.json", *only, "--capability", "89")
    assert len(found) == 2, "forward and join"
    assert all(row["shared"] <= 99 * 1024 for row in found.values())
