"""An ablation of two variants that two steps each train."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
SMALL = {
    "train": str(ROOT / "configs" / "training" / "tiny-d2f.yaml"),
    "set": {"steps": 2, "data.rows": 2, "data.tasks": {"sudoku": 1}, "lora": {"r": 2}},
    "seeds": [1, 2],
    "variants": [{"name": "soft"}, {"name": "hard", "set": {"distill_target": "hard"}}],
    "untrained": [
        {"name": "teacher", "model": "tiny-teacher",
         "decode": [{"name": "static", "decoder": "static", "options": {"block_size": 8}}]}
    ],
    "decode": [{"name": "one", "decoder": "d2f", "options": {"tau_conf": 0.9}}],
    "tasks": ["sudoku"],
    "problems": 3,
    "against": "soft",
}  # fmt: skip


def written(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "ablation.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    return path
