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
    "decode_step": "--shapes tiny --rows 4 --cached 16 --repeat 1",
    "train_step": "--shape tiny --length 64 --repeat 1",
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


def test_the_plain_training_step_has_the_gradient_of_ours(monkeypatch):
    """What the benchmark compares does one and the same."""
    import torch

    from benchmarks.shapes import build
    from benchmarks.train_step import draw, ours, plain
    from d2f.adapters import new_lora

    torch.manual_seed(0)
    model = build("tiny", torch.float32, "cpu")
    model.backbone.requires_grad_(False)
    new_lora(model, r=4, alpha=8, dropout=0.0)
    trained = {n: p for n, p in model.adapter.named_parameters() if p.requires_grad}
    for parameter in trained.values():
        torch.nn.init.normal_(parameter, std=0.2)
    batch, share = draw(model, 2, 96)
    got = torch.autograd.grad(ours(model, batch)(), list(trained.values()))
    want = torch.autograd.grad(plain(model, batch, share)(), list(trained.values()))
    for name, a, b in zip(trained, got, want, strict=True):
        assert b.abs().max() > 0, name
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
