"""The small trained models that ship with the package, by name: whole, or adapters of another."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent


def names() -> list[str]:
    """List the names of the bundled models; `d2f.load` takes them."""
    return sorted(p.name for p in HERE.iterdir() if _is_model(p))


def resolve(name: str) -> str:
    """Return the folder of a bundled model, or of its adapter (``NAME/adapter``), or `name` itself
    where there is no such model."""
    folder = HERE / name
    if name.removesuffix("/adapter") in names() and not Path(name).exists() and _is_model(folder):
        return str(folder)
    return name


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
