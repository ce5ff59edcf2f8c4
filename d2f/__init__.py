"""Discrete Diffusion Forcing: what a diffusion language model is (masks, noise, cache, weights).

`load` is the way in. Importing this package loads nothing heavy; torch comes with the first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from d2f.device import spin_briefly

if TYPE_CHECKING:
    from d2f.contract import Contract
    from d2f.loading import load
    from d2f.model import DiffusionModel

__version__ = "0.1.0"
__all__ = ["Contract", "DiffusionModel", "load"]

spin_briefly()  # before torch is imported

_HOMES = {"load": "d2f.loading", "Contract": "d2f.contract", "DiffusionModel": "d2f.model"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        from d2f.errors import did_you_mean

        raise AttributeError(f"module 'd2f' has no attribute {name!r}{did_you_mean(name, _HOMES)}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
