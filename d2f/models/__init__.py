"""The small trained models that ship with the package, by name."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """Names of the bundled models; `d2f.load` takes them."""
    return sorted(p.parent.name for p in HERE.glob("*/config.json"))


def resolve(name: str) -> str:
    """The folder of a bundled model, or `name` itself where there is no such model."""
    folder = HERE / name
    if "/" not in name and not Path(name).exists() and (folder / "config.json").is_file():
        return str(folder)
    return name
