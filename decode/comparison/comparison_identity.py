"""What decides the measurements of a comparison: one that goes on must have the same."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d2f.models import resolve
from decode.comparison.comparison_config import CompareConfig, Endpoint, Ours, options_file
from decode.comparison.workload import Workload

_FREE = {"output", "figures", "entries"}  # of the configuration; entries are told one by one


def identity(
    config: CompareConfig, workloads: Sequence[Workload], about: dict[str, Any]
) -> dict[str, Any]:
    """Settings, machine, versions, and digests of prompts and of files that are named, by dotted
    keys, so that a difference can be told."""
    found: dict[str, Any] = {"device": about["device"]}
    found |= {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
    found |= {f"version of {name}": version for name, version in about["versions"].items()}
    found |= _flat(config.model_dump(mode="json", exclude=_FREE))
    found["entries"] = [entry.name for entry in config.entries]  # their order is that of the runs
    found["tasks"] = [task.identity for task in config.chosen]
    prompts = [[item.id, item.prompt] for workload in workloads for item in workload.items]
    found["prompts"] = _digest(json.dumps(prompts).encode())
    for entry in config.entries:
        key = f"entries.{entry.name}"
        found |= _flat(entry.model_dump(mode="json"), f"{key}.")
        if isinstance(entry, Ours):
            for task in config.chosen or (None,):
                path = options_file(entry, task.name if task else None)
                if path is not None:
                    found[f"content of {path}"] = _digest(Path(path).read_bytes())
        named = [] if isinstance(entry, Endpoint) else [entry.model]
        if isinstance(entry, Ours) and entry.adapter is not None:
            named.append(entry.adapter)
        for name in named:
            if Path(resolve(name)).is_dir():
                found[f"files of {name}"] = _files(Path(resolve(name)))
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def _files(folder: Path) -> str:
    """Names, sizes and times: the weights themselves would take longer to read than to measure."""
    files = sorted((p, p.stat()) for p in folder.rglob("*") if p.is_file())
    found = [f"{p.relative_to(folder)} {s.st_size} {s.st_mtime_ns}" for p, s in files]
    return _digest("\n".join(found).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
