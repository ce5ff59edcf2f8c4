"""The kernels' benchmarks run where there is no GPU, and the kernels compile for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

ROOT = Path(__file__).parents[2]
SMALL = {
    "kernels loss": "--rows 3 --vocabularies 300 --width 8 --repeat 1",
    "kernels confidence": "--rows 1 3 --vocabularies 300 --width 8 --repeat 1",
    # in bf16, which is a GPU's: RoPE is in fp32 then, and attention gets two dtypes
    "decode_step": "--shapes tiny --rows 4 --cached 16 --repeat 1 --dtype bfloat16",
    "train_step": "--shape tiny --length 64 --repeat 1 --dtype bfloat16 --ways plain compiled",
    "kernels attention": "--rows 4 --cached 16 --lengths 8 --repeat 1",
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
    out = run(*module.split(), *SMALL[module].split(), "--json", str(path))
    measured = json.loads(path.read_text())["measured"]
    assert measured and len(out.splitlines()) > len(measured) / 2


def test_calls_of_microseconds_take_turns_at_buffers_that_a_cache_does_not_hold(monkeypatch):
    import torch

    from benchmarks import common

    seen: list[int] = []
    common.replayed_milliseconds(seen.append, 3, "cpu", repeat=2)
    assert seen == [0, 1, 2] * (3 + 2), "three times uncounted"
    properties = SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for size in (1 << 20, 9 << 20, 68 << 20, 1 << 30):
        copies = common.copies_beyond_cache(size, "cuda")
        assert copies >= 3 and copies * size > 4 * properties.L2_cache_size


def test_flash_attention_stands_where_there_is_no_mask(tmp_path):
    path = tmp_path / "out.json"
    run("kernels", "attention", *SMALL["kernels attention"].split(), "--json", str(path))
    rows = json.loads(path.read_text())["measured"]
    assert [row["what"] for row in rows if "flash" in row] == ["decoding", "bidirectional"] * 2
    assert all(row["blocks"] == 1 for row in rows if row["what"] == "decoding" and "flash" in row)
    assert any(row["blocks"] == 2 for row in rows if row["what"] == "decoding")


def compiled(tmp_path, *arguments: str) -> dict[str, dict]:
    """What `benchmarks.compiled_kernels` says of each kernel in bf16, by its name."""
    path = tmp_path / "kernels.json"
    run("compiled_kernels", "--dtypes", "bfloat16", "--json", str(path), *arguments)
    rows = json.loads(path.read_text())["measured"]
    return {row["kernel"]: row for row in rows}


@pytest.mark.slow
def test_the_kernels_of_attention_keep_their_limits_on_an_h100(tmp_path):
    """Compiled as a launch does it, with the types and alignments of real arguments."""
    found = compiled(tmp_path, "--only", "32 heads over 32", "28 heads over 4")
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
    found = compiled(tmp_path, "--only", "write slots", "confidence", "masked KL")
    assert set(found) == names
    assert not any(row["spilled"] for row in found.values())
    assert all(row["blocks"] >= 6 for row in found.values())


def test_a_smaller_gpu_gets_the_tile_that_fits(tmp_path):
    """As at a launch: a block of an RTX 4090 may take 99 KiB, the tile of an H100 takes 112."""
    only = ("--only", "32 heads over 32, dimension 128, 64 rows")
    found = compiled(tmp_path, *only, "--capability", "89")
    assert len(found) == 2, "forward and join"
    assert all(row["shared"] <= 99 * 1024 for row in found.values())


def test_the_plain_training_step_has_the_gradient_of_ours(monkeypatch):
    """What the benchmark compares does one and the same."""
    import torch

    from benchmarks.common import build
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
