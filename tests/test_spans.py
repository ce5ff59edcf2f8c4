"""Every mask of the field, as spans, against the predicate allow(q, k) that defines it."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d2f import spans as sp
from d2f.spans import block_ends, branch_spans, prefix, shadow_spans, stack, widened
from triton_kernels.span_attention import validate_spans

lengths = st.integers(0, 40)
sizes = st.integers(1, 12)


def seen(spans, keys):
    """What each query sees, as a set of keys, read off the spans one key at a time."""
    rows = []
    for ranges in spans.tolist():
        keys_of_row = [k for k in range(keys) if any(a <= k < b for a, b in ranges)]
        rows.append(set(keys_of_row))
    return rows


def same(spans, queries, keys, allow):
    """The spans are well formed and are exactly the predicate."""
    spans = torch.as_tensor(spans, dtype=torch.int32)
    validate_spans(spans, keys)
    assert spans.shape[0] == queries
    assert seen(spans, keys) == [{k for k in range(keys) if allow(q, k)} for q in range(queries)]


@st.composite
def prompted(draw):
    """(length, prompt length, block size)"""
    length = draw(lengths)
    return length, draw(st.integers(0, length)), draw(sizes)


def d2f_block(position, prompt, size):
    return 0 if position < prompt else 1 + (position - prompt) // size


@given(prompted())
def test_the_masks_of_whole_sequences(case):
    """Bidirectional; causal; D2F's student; blocks on absolute positions (SDAR)."""
    length, prompt, size = case

    def of(block):
        return lambda q, k: block(k) <= block(q)

    for spans, allow in (
        (sp.bidirectional(length), lambda q, k: True),
        (sp.causal(length), lambda q, k: k <= q),
        (sp.block_causal(*case), of(lambda i: d2f_block(i, prompt, size))),
        (sp.block_causal(length, 0, size), of(lambda i: i // size)),
    ):
        same(spans, length, length, allow)


@given(prompted())
def test_block_ends_are_one_past_the_last_position_of_the_same_block(case):
    length, prompt, size = case
    blocks = [d2f_block(i, prompt, size) for i in range(length)]
    want = [max(i for i in range(length) if blocks[i] == b) + 1 for b in blocks]
    assert block_ends(*case).tolist() == want


def block_diffusion_training(length, size):
    """The mask of SDAR's and BD3-LM's training on [noisy; clean], which nothing here trains with:
    shows that two spans a query say it, and starts no query's first range at 0."""
    ends = block_ends(length, 0, size)
    starts = np.arange(length) // size * size
    noisy = stack((starts, ends), (length, length + starts))
    clean = stack((length, length + ends), (0, np.zeros_like(ends)))
    return torch.from_numpy(np.concatenate((noisy, clean))).to(torch.int32)


@given(lengths, sizes)
def test_block_diffusion_training_on_noisy_then_clean(length, size):
    def allow(q, k):
        q_noisy, k_noisy = q < length, k < length
        q_block, k_block = q % length // size, k % length // size
        if q_noisy and k_noisy:
            return q_block == k_block
        if q_noisy:
            return q_block > k_block
        return not k_noisy and q_block >= k_block

    same(block_diffusion_training(length, size), 2 * length, 2 * length, allow)


@given(lengths, sizes, st.booleans())
def test_wedlm_training_on_clean_then_reordered(length, size, bidirectional):
    """Bidirectional, a reordered query sees all of its block; clean ones stay causal."""

    def allow(q, k):
        q_stream, k_stream = q // length, k // length
        q_block, k_block = q % length // size, k % length // size
        sees = k <= q or (bidirectional and q_stream == 1)
        own = q_stream == k_stream and q_block == k_block and sees
        return own or (k_stream == 0 and k_block < q_block)

    made = sp.wedlm_training(length, size, bidirectional=bidirectional)
    same(made, 2 * length, 2 * length, allow)


@given(st.data())
def test_the_shadow_of_a_sequence_sees_all_but_its_counterpart(data):
    """WINO on a bidirectional model; the shadow's slots follow the sequence's."""
    length = data.draw(st.integers(1, 40))
    block = data.draw(st.integers(1, length))
    start = data.draw(st.integers(0, length - block))
    hidden, total = np.arange(start, start + block), length + block
    spans = shadow_spans(hidden, hidden + 1, np.full(block, length), length, total)
    same(spans, block, total, lambda row, k: k != start + row)


@given(st.data())
def test_the_shadow_of_a_block_sees_what_the_block_sees_without_its_counterpart(data):
    """WINO's check inside the D2F pipeline: the blocks up to its own, and its own shadow."""
    length = data.draw(st.integers(1, 40))
    prompt = data.draw(st.integers(0, length - 1))
    size = data.draw(sizes)
    position = data.draw(st.integers(prompt, length - 1))
    ends = block_ends(length, prompt, size)
    hidden = np.flatnonzero(ends == ends[position])
    hidden = hidden[hidden >= prompt]
    slot = length + data.draw(st.integers(0, 9))  # of the shadow, others before it
    spans = shadow_spans(hidden, hidden + 1, ends[hidden], slot, slot + len(hidden))

    def allow(row, k):
        if k < length:
            return d2f_block(k, prompt, size) <= d2f_block(position, prompt, size) and (
                k != hidden[row]
            )
        return slot <= k < slot + len(hidden)

    same(spans, len(hidden), slot + len(hidden) + 3, allow)


@given(st.data())
def test_a_branch_sees_itself_where_it_is_another_state_and_the_sequence_elsewhere(data):
    """FreeDave's candidates: position p of a branch lies in a scratch slot for p in
    [shared, stop), in slot p otherwise; a row sees the positions before its end."""
    length, prompt, size = data.draw(prompted())
    stop = data.draw(st.integers(0, length))
    shared = data.draw(st.integers(0, stop))
    scratch = length + data.draw(st.integers(0, 9))
    ends = block_ends(length, prompt, size)[:stop]

    def allow(q, k):
        if k < length:
            return k < ends[q] and not shared <= k < stop
        return scratch <= k < scratch + stop - shared and k - scratch + shared < ends[q]

    same(branch_spans(ends, shared, stop, scratch), stop, scratch + stop - shared + 3, allow)


@st.composite
def any_spans(draw):
    """Spans of one sequence over as many keys as queries, K from 1 to 3."""
    kind = draw(st.integers(0, 3))
    length, prompt, size = draw(prompted())
    if kind == 0:
        return sp.block_causal(length, prompt, size)
    if kind == 1:
        return sp.wedlm_training(length, size)
    if kind == 2:
        return block_diffusion_training(length, size)
    own, hidden = np.full(length, length), np.arange(prompt, length)  # a sequence with a shadow
    rest = shadow_spans(hidden, hidden + 1, own[prompt:], length, 2 * length - prompt)
    return torch.from_numpy(np.concatenate((widened(prefix(own), 3), rest))).to(torch.int32)


@given(any_spans(), st.integers(0, 50))
def test_shift_moves_every_key_and_keeps_empty_rows_empty(spans, offset):
    keys = len(spans)
    moved = sp.shift(spans, offset)
    validate_spans(moved, keys + offset)
    assert seen(moved, keys + offset) == [{k + offset for k in row} for row in seen(spans, keys)]


@given(st.lists(any_spans(), max_size=4), st.integers(0, 10))
def test_packed_sequences_see_only_themselves_and_padding_sees_nothing(parts, padding):
    length = sum(len(part) for part in parts) + padding
    packed = sp.pack(parts, length)
    validate_spans(packed, length)
    want, offset = [], 0
    for part in parts:
        want += [{k + offset for k in row} for row in seen(part, len(part))]
        offset += len(part)
    assert seen(packed, length) == want + [set()] * padding


def ranges(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("spans", "keys", "message"),
    [
        (ranges([[3, 2]]), 5, "starts after its end"),
        (ranges([[0, 6]]), 5, r"outside the keys \[0, 5\)"),
        (ranges([[-1, 2]]), 5, "outside the keys"),
        (ranges([[0, 3], [2, 5]]), 5, "overlap"),
        (ranges([[2, 4], [0, 0], [1, 3]]), 5, "overlap"),
        (ranges([[0, 5], [1, 2]]), 5, "overlap"),
        (ranges([[0, 1]]).long(), 5, "int32"),
        (torch.zeros(2, 2, dtype=torch.int32), 5, "queries, K, 2"),
        (torch.zeros(4, 2, 3, dtype=torch.int32), 5, "queries, K, 2"),
        (torch.zeros(4, 4, 2, dtype=torch.int32), 5, "1 to 3"),
        (torch.zeros(4, 0, 2, dtype=torch.int32), 5, "1 to 3"),
    ],
)
def test_validate_refuses_malformed_spans(spans, keys, message):
    with pytest.raises(ValueError, match=message):
        validate_spans(spans, keys)


def test_validate_takes_touching_and_empty_ranges_and_leading_dimensions():
    validate_spans(ranges([[2, 4], [0, 2], [9, 9]], [[0, 0], [0, 0], [0, 0]])[None, None], 4)


def test_a_row_too_short_for_its_sequences_is_an_error():
    with pytest.raises(ValueError, match="do not fit in a row of 7"):
        sp.pack([sp.causal(4), sp.causal(4)], 7)
