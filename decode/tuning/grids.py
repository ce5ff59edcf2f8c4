"""The options that can be searched and the values that are tried by default; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from decode.commands.decoder_flags import DECODER_OPTIONS

OPTIONS = tuple(
    option.name
    for option in DECODER_OPTIONS
    if option.kind in (int, float) and option.name != "max_new_tokens"
)
"""Those that are numbers."""
DEFAULT_GRIDS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "d2f": {
        "tau_add": (0.1, 0.5),
        "tau_act": (0.95, 1.0),
        "tau_conf": (0.8, 0.9, 0.95, 0.97, 0.99),
    },
    "threshold": {"tau": (0.6, 0.7, 0.8, 0.9, 0.95, 0.99)},
    "factor": {"factor": (0.1, 0.3, 1.0, 2.0)},
    "entropy": {"gamma": (0.01, 0.03, 0.1, 0.3, 1.0)},
    "block": {"tau": (0.7, 0.85, 0.95, 0.99)},
    "wedlm": {"window": (8, 16), "entropy_threshold": (0.1, 0.2, 0.4, 0.6)},
}
