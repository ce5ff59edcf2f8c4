"""Odd values and odd text, for any fuzzer's strategies."""

from __future__ import annotations

import math

from hypothesis import strategies as st

TEXT = st.sampled_from(
    ["", " ", "\0", "\x1b[2J", "\ud800", "é" * 50, "x" * 5000, "..", "../../etc/passwd", "-1",
     "~", "null", "no", "1e-4", "0x1F", "&a", "*a", "{", "a: b", "<<", "!!python/name:os.system",
     "%s%n", "{task}", "\u202e", "\U0010ffff"]
) | st.text(max_size=12)  # fmt: skip
NUMBERS = st.sampled_from(
    [0, -1, 1, 2**31, 2**63, 2**64, 10**12, 10**400, 0.5, -0.0, 1e-320, 1e308, -1e308, math.inf,
     -math.inf, math.nan]
) | st.integers() | st.floats()  # fmt: skip
LEAVES = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    """Text with a few pieces removed, doubled or replaced."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        piece = draw(st.sampled_from(["", text[start:end] * 2, "[" * 200, "{a: " * 60]) | TEXT)
        text = text[:start] + piece + text[end:]
    return text
