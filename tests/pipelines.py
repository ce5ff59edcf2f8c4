"""D2F's options as the property tests draw them."""

from __future__ import annotations

from hypothesis import strategies as st

import decode

sizes = st.one_of(st.sampled_from([1, 3, 8, 10]), st.integers(1, 64))
lengths = st.one_of(st.integers(1, 30), st.integers(1, 64))


def shares(size: int) -> st.SearchStrategy[float]:
    """Thresholds for the decoded share of a block: usual ones, and exact fractions of its size."""
    few = st.integers(0, min(size, 3))  # what a forward or two decode
    fractions = st.one_of(few, st.integers(0, size)).map(lambda k: k / size)
    return st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.95, 1.0]), fractions)


@st.composite
def pipelines(draw: st.DrawFn, **options: st.SearchStrategy) -> decode.D2F:
    """A pipeline with blocks of 1 to 64 tokens; options: what else is drawn, a `sampling` as a
    mapping of options."""
    size, length = draw(sizes), draw(lengths)
    drawn = {name: draw(values) for name, values in options.items()}
    return decode.D2F(
        block_size=size,
        tau_add=draw(shares(min(size, length))),
        tau_act=draw(shares(min(size, length))),
        max_new_tokens=length,
        forced_pick=draw(st.sampled_from(["confidence", "entropy", "margin"])),
        **drawn.pop("sampling", {}),
        **drawn,
    )
