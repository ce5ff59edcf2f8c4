"""The examples drawn in docstrings, computed: a drawing that the code does not keep is worse than
none. Each test is named after the docstring that it holds."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shadows import CONTRACT, SHIFTED
from shadows import MASK as M
from tiny import random_model

import decode
from d2f.attention import SpanPlan
from d2f.noise import clean_prefix_ratios, decoding_ratios, observed_first
from d2f.spans import causal
from decode.decoders.branches import Branch, with_branches
from decode.decoders.session import feed
from decode.decoders.shadow import add_shadow
from decode.engine.batch import Wanted, join
from decode.engine.cuda_graphs import GraphForward, Kind
from decode.step import Predictions, Step

CAUSAL = replace(CONTRACT, prompt_rule="causal")
BLOCKS = {"objective": "d2f", "block_size": 2}
A, B, C, D = 31, 32, 33, 34  # tokens of the response


def ints(*values):
    return np.array(values, dtype=np.int64)


def step_of(ends, read, slots=None):
    """A step of rows that see prefixes, for what only looks at slots and spans."""
    slots = np.arange(len(ends)) if slots is None else ints(*slots)
    spans = np.stack((np.zeros_like(ends), ends), axis=-1)[:, None]
    return Step(slots, slots, slots, spans, read, cached=0)


def test_step():
    x, ends = ints(7, 8, 9, M, M, M), ints(2, 2, 4, 4, 6, 6)
    step = feed(x, 2, ends, ints(3, 4, 5), cached=2, logit_shift=0)
    assert step.tokens.tolist() == [9, M, M, M]
    assert step.positions.tolist() == step.slots.tolist() == [2, 3, 4, 5]
    assert step.spans[:, 0].tolist() == [[0, 4], [0, 4], [0, 6], [0, 6]]
    assert step.read.tolist() == [1, 2, 3] and step.cached == 2
    assert feed(x, 2, ends, ints(3, 4, 5), cached=2, logit_shift=1).read.tolist() == [0, 1, 2]


def test_join():
    a, b = step_of(ints(4, 4), ints(1), [2, 3]), step_of(ints(1, 2, 3), ints(2))
    rows = join([a, b], [0, 6])
    assert rows.slots.tolist() == [2, 3, 6, 7, 8] and rows.read.tolist() == [1, 4]
    assert rows.spans[:, 0].tolist() == [[0, 4], [0, 4], [6, 7], [6, 8], [6, 9]]
    first, second = rows.segments
    assert (first.rows, first.slots, first.whole) == (slice(0, 2), slice(0, 4), True)
    assert (second.rows, second.slots, second.whole) == (slice(2, 5), slice(6, 9), False)


def test_rows_that_pad():
    step = Step(
        ints(9, M, M), ints(2, 3, 4), ints(2, 3, 4),
        ints([[0, 4]], [[0, 4]], [[0, 6]]), ints(1, 2), cached=2,
    )  # fmt: skip
    model = random_model("llada")
    forward = GraphForward(model, model.new_cache(100), Kind(4), None)
    forward._fill(join([step], [0]), Wanted())
    assert forward.host.tolist() == [
        [9, M, M, 0], [2, 3, 4, 0], [2, 3, 4, 99],
        [0, 0, 0, 0], [4, 4, 6, 0], *[[0, 0, 0, 0]] * 4,  # three ranges a row
        [1, 2, 0, 0], *[[0, 0, 0, 0]] * 6,  # nothing is queried or drawn
    ]  # fmt: skip
    assert forward.host.dtype == torch.int64


def seen(spans):
    """Which slots each row sees."""
    return [sorted(s for a, b in row for s in range(a, b)) for row in spans.tolist()]


def answer(session, step, tokens, confidence=0.5, entropy=0.5, queried=()):
    """Hand a step its predictions, in the order of its reads; numbers are those of all."""
    n = len(step.read)
    scores = []
    for given in (confidence, entropy):
        given = [given] * n if np.isscalar(given) else list(given) + [0.0] * (n - len(given))
        scores.append(np.array(given, np.float32))
    probability = None
    if step.queried_tokens is not None:
        probability = np.array([1.0] * (n - len(queried)) + list(queried), np.float32)
    tokens = np.array(list(tokens) + [9] * (n - len(tokens)))
    session.accept(Predictions(tokens, scores[0], probability, entropy=scores[1]))


def play(decoder, contract, *script):
    """Decode after the prompt 7 8: before each answer, a list of what the step and the session
    are. Returns the session, which is done, and the last of its steps."""
    session, last = decoder.begin([7, 8], contract), None
    for expected, *answered in script:
        last = session.step()
        for name, want in expected.items():
            assert FACTS[name](session, last) == want, name
        answer(session, last, *answered)
    return session, last


def response(session):
    return session.view(2, len(session.x), "decoded").tokens


FACTS = {
    "tokens": lambda session, step: step.tokens.tolist(),
    "positions": lambda session, step: step.positions.tolist(),
    "slots": lambda session, step: step.slots.tolist(),
    "reads": lambda session, step: step.positions[step.read].tolist(),
    "response": lambda session, step: response(session),
    "states": lambda session, step: [block.state for block in session.blocks()],
    "spare": lambda session, step: session.spare[2],
    "verified": lambda session, step: [
        p for _, part in session.verified for p in part.tolist()
    ] if isinstance(session.verified, list) else session.verified.tolist(),
}  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "positions", "slots", "sees"),
    [
        (3, [2, 3, 4, 5], [7, 8, 9, 10],
         [[0, 1, 7, 8]] * 2 + [[0, 1, 7, 8, 9, 10]] * 2),
        (4, [4, 5], [7, 8], [[0, 1, 2, 3, 7, 8]] * 2),
    ],
)  # fmt: skip
def test_with_branches(differs, positions, slots, sees):
    ends, x = ints(2, 2, 4, 4, 6, 6), ints(7, 8, 22, M, M, M)
    own = feed(x, 2, ends, ints(3, 4, 5), cached=2, logit_shift=0)
    assert seen(own.spans) == [[0, 1, 2, 3]] * 2 + [[0, 1, 2, 3, 4, 5]] * 2
    other = x.copy()
    other[differs] = 23
    step = with_branches(own, [Branch(other, ends, 6, differs, ints(4, 5))], scratch=7, spare=6)
    assert step.positions[4:].tolist() == positions and step.slots[4:].tolist() == slots
    assert step.tokens[4:].tolist() == other[positions].tolist()
    assert seen(step.spans[4:]) == sees
    assert step.read[3:].tolist() == [4 + positions.index(p) for p in (4, 5)]
    assert step.cached == 2 and with_branches(own, [], scratch=7, spare=6) is own


def test_with_branches_reads_an_own_row_that_computes_the_same():
    """Positions 2 and 3 see nothing of position 4, the first that differs."""
    ends, x = ints(2, 2, 4, 4, 6, 6), ints(7, 8, M, M, M, M)
    own = feed(x, 2, ends, ints(2, 3, 4, 5), cached=2, logit_shift=0)
    other = x.copy()
    other[4] = 23
    step = with_branches(own, [Branch(other, ends, 6, 4, ints(2, 3, 5))], scratch=7, spare=6)
    assert step.positions.tolist() == [2, 3, 4, 5, 4, 5]
    assert step.read[4:].tolist() == [0, 1, 5]


def test_shadow_module():
    x, ends, verified = ints(7, 8, 9, 9), ints(2, 2, 4, 4), ints(2, 3)
    own = feed(x, 2, ends, ints(), cached=2, logit_shift=0)
    block = add_shadow(own, x, ends, 2, 4, verified, 4, CONTRACT)
    assert block.tokens[2:].tolist() == [M, M] and block.slots[2:].tolist() == [4, 5]
    assert seen(block.spans[2:]) == [[0, 1, 3, 4, 5], [0, 1, 2, 4, 5]]
    pairs = add_shadow(own, x, ends, 2, 4, verified, 4, SHIFTED)
    assert pairs.positions[2:].tolist() == [1, 2, 3] and pairs.tokens[2:].tolist() == [8, 9, M]
    assert pairs.slots[2:].tolist() == [4, 6, 7] and pairs.read.tolist() == [2, 3]
    assert seen(pairs.spans[2:]) == [[0, 4], [0, 1, 6, 7], [0, 1, 6, 7]]


@pytest.mark.parametrize(
    ("cache", "contract", "fed"),
    [
        ("none", CONTRACT, [range(6)] * 4),
        ("prefix", CONTRACT, [range(6), [2, 3, 4, 5], range(6), [4, 5]]),
        ("dual", CONTRACT, [range(6), [2, 3], range(6), [4, 5]]),
        ("none", replace(CONTRACT, **BLOCKS), [[0, 1, 2, 3], [2, 3], [2, 3, 4, 5], [4, 5]]),
    ],
)
def test_blockwise_module(cache, contract, fed):
    decoder = decode.Static(block_size=2, max_new_tokens=4, cache=cache)
    session, _ = play(decoder, contract, *(({"positions": list(rows)}, []) for rows in fed))
    assert session.step() is None


def test_blockwise_feed_rows():
    decoder = decode.Static(block_size=2, max_new_tokens=4, cache="dual")
    last = {"positions": [3, 4, 5], "slots": [6, 4, 5], "reads": [3]}
    first = ({}, [], np.arange(2) / 9 + 0.1)  # the second of a block is surer
    play(decoder, SHIFTED, first, ({}, []), first, (last, []))


PIPELINE = {"tau_add": 0.5, "tau_act": 1.0, "tau_conf": 0.9, "max_new_tokens": 4}


def test_d2f_module():
    session, _ = play(
        decode.D2F(2, **PIPELINE), CONTRACT,
        ({"states": ["fully active"], "tokens": [7, 8, M, M]}, [A], [0.95, 0.3]),
        ({"states": ["fully active", "semi-active"], "tokens": [A, M, M, M]},
         [B, C], [0.3, 0.95, 0.3]),
        # Block 1 is fed with its final tokens.
        ({"states": ["cached", "fully active"], "tokens": [A, B, C, M]}, [D], 0.3),
    )  # fmt: skip
    assert session.step() is None and session.tokens == [A, B, C, D]


def test_d2f_lossless_module():
    session, _ = play(
        decode.D2F(2, **PIPELINE, lossless=2), CONTRACT,
        ({}, [A, B], [0.95, 0.6]),
        ({"tokens": [A, M, M, M, A, B, M, M]}, [B, 9, 9, C], 0.3),
        ({"response": (A, B, C, None)}, [D], 0.3),
    )  # fmt: skip
    assert session.step() is None and session.tokens == [A, B, C, D]


def test_d2f_revoke_always():
    session, _ = play(
        decode.D2F(4, tau_conf=0.5, max_new_tokens=4, revoke="always", tau_revoke=0.9), CONTRACT,
        ({"response": (None,) * 4, "spare": 0}, [], [0.9, 0.9, 0.9, 0.3]),
        ({"response": (9, 9, 9, None), "spare": 2}, [], 0.3, 0, [0.2, 0.1, 0.95]),
        ({"response": (None, None, 9, 9), "spare": 0}, [], [0.9, 0.3]),
        ({"response": (9, None, 9, 9), "spare": 0}, [], 0.3),
    )  # fmt: skip
    counts = {"drafted": 6, "revoked": 2, "revoked_changed": 0}
    assert counts.items() <= session.counts.items() and session.step() is None


def test_d2f_revoke_commit():
    session, _ = play(
        decode.D2F(4, tau_conf=0.5, max_new_tokens=4, revoke="commit", tau_revoke=0.9), CONTRACT,
        ({"states": ["fully active"]}, [], 0.9),
        ({"states": ["to cache"], "verified": [2, 3, 4, 5]}, [], 0.9, 0, [0.95, 0.2, 0.95, 0.95]),
        ({"states": ["fully active"], "response": (9, None, 9, 9)}, [], 0.9),
        ({"states": ["to cache"], "verified": [2, 4, 5]}, [], 0.9, 0, [0.95] * 3),
    )  # fmt: skip
    assert session.pipeline[1].state == "cached"


def test_freedave_module():
    session, step = play(
        decode.FreeDave(max_new_tokens=4, drafts=3), CONTRACT,
        ({}, [A, B, C, D], [0.3, 0.5, 0.9, 0.4]),
        ({}, [A, B, D, A, D, A], [0.3, 0.5, 0.4, 0.3, 0.4, 0.3]),
    )  # fmt: skip
    of_response = step.tokens[step.positions >= 2].reshape(3, 4)
    assert of_response.tolist() == [[M, M, C, M], [M, B, C, M], [M, B, C, D]]
    assert [r.token for r in session.revealed] == [B, D, A] and session.step() is None


def test_wedlm_module():
    _, step = play(
        decode.WeDLM(window=4, max_new_tokens=6), CAUSAL,
        ({"tokens": [7, 8, M, M, M, M], "positions": [*range(6)], "slots": [*range(6)]},
         [A, 9, C], 0, [0.1, 0.9, 0.1, 0.9]),
        ({"tokens": [A, C, M, M], "positions": [2, 4, 3, 5], "slots": [2, 3, 4, 5]},
         [B], 0, [0.1, 0.9]),
        ({"tokens": [B, C, M, M], "positions": [3, 4, 5, 6], "slots": [3, 4, 5, 6]}, []),
    )  # fmt: skip
    assert (step.spans[:, 0, 1] == step.slots + 1).all()


@pytest.mark.parametrize(
    ("rows", "known"), [([9, 9, 9], [A, 9]), ([B, 9, 9], [A, B, 9]), ([B, C, D], [A, B, C, D])]
)
def test_wedlm_verified(rows, known):
    session, _ = play(
        decode.WeDLM(window=4, max_new_tokens=6, verify="ar"), CAUSAL,
        ({}, [A, 9, B, C], 0, [0, 0, 0.1, 0.1, 0.9]),
        ({"slots": [2, 3, 4, 5], "tokens": [A, B, C, M]}, rows, 0, [0, 0, 0, 0.9]),
    )  # fmt: skip
    assert session.settled == known
    accepted = len(known) - 2
    counts = {"accepted": accepted, "rejected": 2 - accepted, "window_rows": 4 + 4}
    assert session.counts == counts
    if len(known) == 2:
        step = session.step()
        assert step.slots.tolist() == [3, 4, 5, 6] and step.tokens.tolist() == [9, M, M, M]
        assert step.read[0] == 0


def test_wino_module():
    session, _ = play(
        decode.Wino(4, 4, tau1=0.6, tau2=0.9, caps=False), CONTRACT,
        ({"verified": []}, [9, B, 9, D], [0.1, 0.9, 0.1, 0.9]),
        ({"verified": [3, 5], "response": (None, B, None, D)}, [A], [0.9], 0, [0.95, 0.3]),
        ({"verified": [2, 3], "response": (A, B, None, None)}, [C, 35], 0.9, 0, [0.95, 0.95]),
    )  # fmt: skip
    assert response(session) == (A, B, C, 35) and session.step() is None


def test_block_module():
    contract = replace(CONTRACT, prompt_rule="block_causal", block_size=4)
    session = decode.Block(max_new_tokens=5).begin([5, 6, 7], contract)
    fed = []
    for _ in range(3):
        step = session.step()
        fed.append((step.positions.tolist(), step.cached, step.positions[step.read].tolist()))
        answer(session, step, [])
    assert fed[:2] == [([0, 1, 2, 3], 0, [3]), ([*range(8)], 0, [4, 5, 6, 7])]
    assert fed[2] == ([4, 5, 6, 7], 4, [5, 6, 7])


def test_noise():
    assert decoding_ratios(6, 2, 4, 0.5).tolist() == [0, 0, 0.5, 0.5, 1, 1]
    chosen = SimpleNamespace(integers=lambda blocks: 1, uniform=lambda low, high: 0.5)
    ratios, end = clean_prefix_ratios(6, 2, 0.05, chosen)
    assert ratios.tolist() == [0, 0, 0.5, 0.5, 1, 1] and end == 4
    assert observed_first(np.array([0, 1, 0, 1, 0, 0], bool), 3).tolist() == [0, 2, 1, 4, 5, 3]


def test_flat_spans():
    flat = SpanPlan(causal(3))._flat_spans(2, 3)[:, 0]
    assert flat.tolist() == [[0, 1], [0, 2], [0, 3], [3, 4], [3, 5], [3, 6]]
