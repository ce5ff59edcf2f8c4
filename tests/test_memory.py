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
def bases(tmp_path_factory) -> dict[str, Path]:
    """The same model in two dtypes: 110 MB in fp32, 55 in bf16."""
    folder = tmp_path_factory.mktemp("bases")
    model = build(
        "llada", tokenizer(), hidden_size=512, intermediate_size=1408, layers=6, heads=8,
        kv_heads=8, context_length=256, vocab_size=8000,
    )  # fmt: skip
    assert abs(model.backbone.num_parameters() / WEIGHTS - 1) < 0.02
    for name in ("float32", "bfloat16"):
        save_model(model, folder / name, dtype=getattr(torch, name))
    return {name: folder / name for name in ("float32", "bfloat16")}


def measured(tmp_path: Path, **values: object) -> dict[str, dict[str, int]]:
    data = {"tasks": {"countdown": 1.0}, "row_length": 64, "rows": 4}
    config = {"objective": "d2f", "output": str(tmp_path / "run"), "steps": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"data": data} | values))
    # The C library else keeps what was freed for what is asked for next, and the figures are of it.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROCESS), str(tmp_path / "config.json")],
        env=os.environ | own, text=True, capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_an_adapter_in_fp32(bases, tmp_path, stored):
    """From a base that is read as it is, and from one that is converted."""
    result = measured(tmp_path, init=str(bases[stored]))
    found, estimated = result["found"], result["estimated"]
    weights = 4 * WEIGHTS
    # A file that is converted stays mapped meanwhile: the system takes its pages back at need.
    mapped = 2 * WEIGHTS if stored == "bfloat16" else 0
    assert found["load"] <= 1.2 * weights + mapped + ALLOWANCE
    assert found["export"] - found["held"] <= 0.2 * weights + 4 * MERGED + OF_EXPORT
    for name in ("train", "export"):
        assert abs(found[name] - estimated[name]) <= 0.2 * estimated[name] + ALLOWANCE
    assert found["load"] <= estimated["load"] + mapped + ALLOWANCE


def test_a_base_in_bf16_is_not_read_again_in_fp32(bases, tmp_path):
    result = measured(
        tmp_path, init=str(bases["bfloat16"]), base_dtype="bfloat16", export_dtype="bfloat16"
    )
    found, estimated = result["found"], result["estimated"]
    assert found["export"] - found["held"] <= 0.2 * 2 * WEIGHTS + 2 * MERGED + OF_EXPORT
    assert abs(found["train"] - estimated["train"]) <= 0.2 * estimated["train"]
    assert abs(found["export"] - estimated["export"]) <= ALLOWANCE


def test_all_weights_are_trained(bases, tmp_path):
    values = {"objective": "masked_diffusion", "init": str(bases["float32"])}
    result = measured(tmp_path, **values)
    for name in ("train", "export"):
        found, estimated = result["found"][name], result["estimated"][name]
        assert abs(found - estimated) <= 0.2 * estimated
