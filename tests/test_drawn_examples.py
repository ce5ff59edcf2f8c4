"""The examples drawn in docstrings, computed: a drawing that the code does not keep is worse than
none. Each test is named after the docstring that it holds."""

import numpy as np
import pytest
import torch
from tiny import random_model

from d2f.span_makers import block_ends, branch_spans, shadow_spans
from d2f.spans import block_causal, wedlm_training
from decode.engine.batch import join
from decode.engine.cuda_graphs import GraphForward
from decode.engine.step import Step, feed

M = 1  # the mask id


def ints(*values):
    return np.array(values, dtype=np.int64)


def step_of(ends, read, slots=None):
    """A step of rows that see prefixes, for what only looks at slots and spans."""
    slots = np.arange(len(ends)) if slots is None else ints(*slots)
    spans = np.stack((np.zeros_like(ends), ends), axis=-1)[:, None]
    return Step(slots, slots, slots, spans, read, cached=0)


class Placed:
    def __init__(self, base):
        self.base = base


def test_spans_module():
    assert block_causal(6, prompt_length=2, block_size=2)[:, 0].tolist() == [
        [0, 2], [0, 2], [0, 4], [0, 4], [0, 6], [0, 6],
    ]  # fmt: skip


def test_wedlm_training():
    clean = [[[0, 1], [0, 0]], [[0, 2], [0, 0]], [[0, 3], [0, 0]], [[0, 4], [0, 0]]]
    reordered = [[[0, 0], [4, 5]], [[0, 0], [4, 6]], [[0, 2], [6, 7]], [[0, 2], [6, 8]]]
    assert wedlm_training(4, block_size=2).tolist() == clean + reordered


def test_block_ends():
    assert block_ends(9, prompt_length=2, block_size=4).tolist() == [2, 2, 6, 6, 6, 6, 9, 9, 9]


def test_shadow_spans():
    hidden = ints(2, 3, 4)
    assert shadow_spans(hidden, hidden + 1, ints(7, 7, 7), 7, 10).tolist() == [
        [[0, 2], [3, 7], [7, 10]],
        [[0, 3], [4, 7], [7, 10]],
        [[0, 4], [5, 7], [7, 10]],
    ]


def test_branch_spans():
    assert branch_spans(ints(2, 6, 8), shared=2, stop=6, scratch=9).tolist() == [
        [[0, 2], [9, 9], [0, 0]],
        [[0, 2], [9, 13], [0, 0]],
        [[0, 2], [9, 13], [6, 8]],
    ]


def test_step():
    x, ends = ints(7, 8, 9, M, M, M), ints(2, 2, 4, 4, 6, 6)
    step = feed(x, 2, ends, ints(3, 4, 5), cached=2, logit_shift=0)
    assert step.tokens.tolist() == [9, M, M, M]
    assert step.positions.tolist() == step.slots.tolist() == [2, 3, 4, 5]
    assert step.spans[:, 0].tolist() == [[0, 4], [0, 4], [0, 6], [0, 6]]
    assert step.read.tolist() == [1, 2, 3] and step.cached == 2
    assert feed(x, 2, ends, ints(3, 4, 5), cached=2, logit_shift=1).read.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("shift", "fed", "spans"),
    [(0, [4, 5], [[0, 6], [0, 6]]), (1, [3, 4, 5], [[0, 4], [0, 6], [0, 6]])],
)
def test_feed(shift, fed, spans):
    ends = ints(2, 2, 4, 4, 6, 6)
    step = feed(np.zeros(6, np.int64), 4, ends, ints(4, 5), cached=4, logit_shift=shift)
    assert step.positions.tolist() == fed and step.spans[:, 0].tolist() == spans
    assert step.read.tolist() == [0, 1]


def test_join():
    a, b = step_of(ints(4, 4), ints(1), [2, 3]), step_of(ints(1, 2, 3), ints(2))
    rows = join([(Placed(0), a), (Placed(6), b)])
    assert rows.slots.tolist() == [2, 3, 6, 7, 8] and rows.read.tolist() == [1, 4]
    assert rows.spans[:, 0].tolist() == [[0, 4], [0, 4], [6, 7], [6, 8], [6, 9]]


def test_rows_that_pad():
    step = Step(
        ints(9, M, M), ints(2, 3, 4), ints(2, 3, 4),
        ints([[0, 4]], [[0, 4]], [[0, 6]]), ints(1, 2), cached=2,
    )  # fmt: skip
    model = random_model("llada")
    forward = GraphForward(model, model.new_cache(100), 4, False, None)
    forward._fill(join([(Placed(0), step)]), None)
    assert forward.host.tolist() == [
        [9, M, M, 0], [2, 3, 4, 0], [2, 3, 4, 99],
        [0, 0, 0, 0], [4, 4, 6, 0], *[[0, 0, 0, 0]] * 4,  # three ranges a row
        [1, 2, 0, 0], [0, 0, 0, 0],
    ]  # fmt: skip
    assert forward.host.dtype == torch.int64
