"""The kernels compile for a GPU that is not there, and keep their limits (the others of its
shapes: benchmarks.compiled_kernels)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import triton

ROOT = Path(__file__).parents[2]
DREAM = "span attention, 28 heads over 4, dimension 128, 64 rows"
OTHERS = ("write slots", "confidence, sampled", "masked KL")


def test_the_kernels_keep_their_limits_on_an_h100(tmp_path):
    """Compiled as a launch does it, with the types and alignments of real arguments, in bf16; in a
    process of its own, without the interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compiled_kernels"]
    given = ["--dtypes", "bfloat16", "--json", str(tmp_path / "k.json"), "--only", DREAM, *OTHERS]
    done = subprocess.run([*command, *given], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "k.json").read_text())["measured"]
    assert {row["kernel"].split(": ")[1] for row in found} == {
        "forward", "join", "write", "logits_tile", "join_tiles", "add_tile", "difference",
    }  # fmt: skip
    for row in found:
        attends = row["kernel"].startswith(DREAM)
        assert row["spilled"] == 0 and row["shared"] <= 227 * 1024, row
        assert row["blocks"] >= (2 if attends else 6), row
        if row["kernel"] == f"{DREAM}: forward":
            assert row["by"] == ["wgmma", "cp.async"], triton.__version__
