"""What a command needs beyond the package's own requirements."""

from __future__ import annotations

from importlib.util import find_spec

from d2f.errors import InputError


def require_matplotlib(otherwise: str | None = None) -> None:
    """Raise InputError if no figure can be drawn here. otherwise: the option that draws none."""
    if find_spec("matplotlib") is None:
        raise InputError(
            "figures need matplotlib, which is not installed: pip install 'd2f-toolkit[plot]'"
            + (f", or give {otherwise}" if otherwise else "")
        )


def require_scipy() -> None:
    """Raise InputError if nothing can be fitted here."""
    if find_spec("scipy") is None:
        raise InputError(
            "fits need scipy, which is not installed: pip install 'd2f-toolkit[ablation]'"
        )


def require_serve() -> None:
    """Raise InputError if the server cannot run here."""
    needed = ("fastapi", "uvicorn", "openai", "prometheus_client")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise InputError(
            f"the server needs {', '.join(missing)}, not installed: "
            "pip install 'd2f-toolkit[serve]'"
        )


def require_ray() -> None:
    """Raise InputError if there can be no more than one process here."""
    if find_spec("ray") is None:
        raise InputError("Ray is not installed: pip install 'd2f-toolkit[ray]'")
