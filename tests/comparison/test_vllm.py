"""decode.compare against a real server of vLLM on a CPU (`make vllm` sets it up)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from decode.compare.report import Report

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
REQUIRED = os.environ.get("D2F_TEST_VLLM") == "required"


@pytest.mark.slow
@pytest.mark.skipif(not REQUIRED and not PYTHON.is_file(), reason="needs `make vllm`")
def test_vllm_and_this_engine_decode_the_same_model_to_the_same_answers(tmp_path):
    """vLLM serves tiny-ar and gives, streamed or whole, the text that our engine gives."""
    server = {"kind": "vllm", "model": "tiny-ar", "dtype": "float32"}
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    values = {
        "output": str(tmp_path / "out"),
        "tasks": ["story"],
        "problems": 4,
        "accuracy_problems": 0,
        "concurrency": [1, 2],
        "repetitions": 1,
        "warmup": 1,
        "vllm_python": str(PYTHON),
        "figures": False,
        "entries": [
            server | {"name": "vLLM", "env": environment, "args": ["--enforce-eager"]},
            server | {"name": "whole", "shares": "vLLM", "stream": False},
            {"name": "ours", "kind": "ours", "model": "tiny-ar", "dtype": "float32"},
        ],
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-m", "decode.compare", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stderr
    report = Report(**json.loads((tmp_path / "out" / "summary.json").read_text()))
    assert report.about["entries"]["vLLM"]["vllm"]
    assert len(report.speeds) == 6 and all(row["failed"] == 0 for row in report.speeds)
    assert [(a["entry"], a["same"], a["problems"]) for a in report.accuracies] == [
        ("vLLM", 4, 4), ("whole", 4, 4), ("ours", 4, 4),
    ]  # fmt: skip
    rows = {(r["entry"], r["concurrency"]): r for r in report.speeds}
    assert all(rows["ours", c]["forwards"] == rows["vLLM", c]["forwards"] for c in (1, 2))
    served = (rows["vLLM", c] for c in (1, 2))
    assert all(row["first"] <= row["finished"] and row["peak_bytes"] for row in served)
