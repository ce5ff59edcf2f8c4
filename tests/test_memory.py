"""What loading, training and exporting need of memory, measured in processes of their own: weights
are never there twice but for a mapped file and what an export merges, and `--check` says what it
takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tokenizer

from d2f.convert import build
from d2f.saving import save_model

PROCESS = Path(__file__).parent / "memory_process.py"
# Whatever the model: of the C library and Python's heap, seen were up to 8 MB; in an export besides
# what its adapter's hash reads of the base, a few pages a tensor, and rows of the embeddings that
# training had not touched, seen were up to 46 MB of a growth.
ALLOWANCE, OF_EXPORT = 16e6, 32e6
WEIGHTS = 27.4e6  # of the model below
MERGED = 6 * 4 * 512 * 512  # weights that the adapter changes; an export has them twice

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model of 55 MB in bf16, 110 in fp32."""
    model = build(
        "llada", tokenizer(), hidden_size=512, intermediate_size=1408, layers=6, heads=8,
        kv_heads=8, context_length=256, vocab_size=8000,
    )  # fmt: skip
    assert abs(model.backbone.num_parameters() / WEIGHTS - 1) < 0.02
    folder = tmp_path_factory.mktemp("base") / "model"
    save_model(model, folder, dtype=torch.bfloat16)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter(base, tmp_path, dtype):
    """On a base that is converted as it is read, and on one that stays as it is."""
    config = {
        "objective": "d2f", "init": str(base), "output": str(tmp_path / "run"), "steps": 1,
        "data": {"tasks": {"countdown": 1.0}, "row_length": 64, "rows": 4},
        "base_dtype": dtype, "export_dtype": dtype,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    # The C library else keeps what was freed for what is asked for next, and the figures are of it.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROCESS), str(tmp_path / "config.json")],
        env=os.environ | own, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    found, estimated = result["found"], result["estimated"]
    size = 4 if dtype == "float32" else 2
    # A file that is converted stays mapped meanwhile: the system takes its pages back at need.
    mapped = 2 * WEIGHTS if dtype == "float32" else 0
    assert found["load"] <= 1.2 * size * WEIGHTS + mapped + ALLOWANCE
    assert found["load"] <= estimated["load"] + mapped + ALLOWANCE
    merging = size * MERGED + OF_EXPORT
    assert found["export"] - found["held"] <= 0.2 * size * WEIGHTS + merging
    for name in ("train", "export"):
        assert abs(found[name] - estimated[name]) <= 0.2 * estimated[name] + ALLOWANCE
