"""python -m benchmarks.gpu.compare_entries --output FOLDER [--vllm-python PYTHON]

`decode.compare` of the bundled models with its local entries on the GPU, beside vLLM where the
Python of an environment with vLLM for this GPU is given. A comparison that was cut off goes on from
what is in FOLDER. On a CPU one entry decodes one problem.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from d2f.config import read_mapping
from d2f.files import write_beside
from d2f.shipped import COMPARISON, find_config

CONFIG = "compare-tiny"
LEAST = {"tasks": "[story]", "problems": "1", "accuracy_problems": "1", "concurrency": "[1]",
         "repetitions": "1", "warmup": "1"}  # fmt: skip


def flags(output: Path, device: str, vllm_python: str | None) -> list[str]:
    """The command line of decode.compare."""
    values = read_mapping(find_config(CONFIG, *COMPARISON))
    entries = [e for e in values["entries"] if e["kind"] != "vllm" or vllm_python]
    if device == "cpu":
        entries = [{**e, "compile": False} for e in entries if e["name"] == "autoregressive"]
    for entry in entries:
        if entry["kind"] == "vllm":
            entry.pop("env", None)  # it is for CPUs
        else:
            entry["device"] = device
    names = [entry["name"] for entry in entries]
    given = {
        "output": str(output),
        "entries": json.dumps(entries),
        "baseline": values["baseline"] if values["baseline"] in names else "autoregressive",
        "figures": "false",
        **(LEAST if device == "cpu" else {}),
        **({"vllm-python": vllm_python} if vllm_python else {}),
    }
    return ["--config", CONFIG, *(part for k, v in given.items() for part in (f"--{k}", v))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; the exit status of decode.compare."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.compare_entries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the report")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM for this GPU")
    parser.add_argument("--json", type=Path, help="file for the report's text")
    options = parser.parse_args(arguments)
    import torch

    from decode.compare.__main__ import main as compare

    device = "cuda" if torch.cuda.is_available() else "cpu"
    status = compare(flags(options.output, device, options.vllm_python))
    report = options.output / "report.md"
    if options.json is not None and report.exists():
        text = report.read_text(encoding="utf-8")
        write_beside(options.json, json.dumps({"report": text}) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
