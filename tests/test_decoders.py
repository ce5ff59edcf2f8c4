"""Options of decoders: what they may be, which decoder fits which model, how each is found; and the
rules that say which tokens a step reveals. Numbers that are compared with a threshold are computed
as the official codes compute them: where one lies exactly on it, the last bit decides."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from block_tiny import sdar, student, wedlm
from hypothesis import given, settings
from hypothesis import strategies as st
from shadows import CONTRACT
from tiny import random_model

import decode
from d2f.errors import InputError
from decode.decoders import DECODERS, as_decoder, default_decoder, find_decoder, qualified_name
from decode.decoders.base import default_grid, option, options_of
from decode.decoders.block import reveal_count
from decode.decoders.session import MOST
from decode.decoders.unmask import bounded, sure, sure_together
from decode.step import Predictions, Step
from tests.references.block import decode_block
from tests.references.blockwise import Guess, _entropy
from tests.references.d2f import decode_d2f
from tests.references.d2f_revoke import decode_d2f_revoking
from tests.references.wino import decode_wino

NUMBER = "must be 0 or more, got"
WHOLE = "must be a whole number of at least 1, got"
BAD = [
    ("d2f", {"tau_add": 1.5}, r"tau_add must lie in \[0, 1\], got 1.5"),
    ("d2f", {"tau_conf": float("nan")}, r"tau_conf must lie in \[0, 1\], got nan"),
    ("d2f", {"tau_conf": "0.9"}, r"tau_conf must lie in \[0, 1\], got '0.9': expected a number"),
    ("d2f", {"block_size": 0}, f"block_size {WHOLE} 0"),
    ("d2f", {"early_exit": "no"}, "early_exit must be true or false, got 'no'"),
    ("d2f", {"forced_pick": "neg_entropy"}, "forced_pick: got 'neg_entropy'; did you mean entropy"),
    ("d2f", {"lossless": 0}, f"lossless {WHOLE} 0"),
    ("d2f", {"lossless": 4, "temperature": 1.0}, r"lossless needs temperature 0.*got 1\.0"),
    ("d2f", {"lossless": 4, "revoke": "commit"}, "got lossless 4 and revoke 'commit'"),
    ("static", {"block_size": 8, "max_new_tokens": 24, "steps": 8}, "multiple of the 3 blocks"),
    ("static", {"cache": "both"}, "cache: got 'both'; expected one of none, prefix, dual"),
    ("threshold", {"tau": float("inf")}, f"tau {NUMBER} inf"),
    ("factor", {"factor": True}, f"factor {NUMBER} True: expected a number"),
    ("freedave", {"tau": 0.9, "steps": 4}, "expected one of them, got steps 4 and tau 0.9"),
    ("freedave", {"eager": True, "cache": "dual"}, "eager needs cache none"),
    ("freedave", {"temperature": 0.5}, "freedave needs temperature 0.*got 0.5"),
    ("wino", {"tau1": 0.9, "tau2": 0.9}, "tau1 must be below tau2 .* got tau1 0.9 and tau2 0.9"),
    ("block", {"block_size": 4, "denoising_steps": 5}, "at most the block size 4, got 5"),
    ("wedlm", {"refill": "block", "verify": "ar"}, "expected another refill, got block"),
    ("wedlm", {"window_attention": "bidirectional"}, "needs refill block.*got refill paper"),
    ("wedlm", {"verify": "ar", "temperature": 0.2}, "verify needs temperature 0.* got 0.2"),
    ("autoregressive", {"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
    ("autoregressive", {"seed": 2**64}, "seed must be at most 18446744073709551615, got 1844674"),
    ("autoregressive", {"seed": -(2**63) - 1}, "seed must be a whole number of at least -922337"),
    ("autoregressive", {"stop": ("",)}, "stop must be non-empty strings"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD)
def test_a_bad_option_is_named_with_what_came(name, options, message):
    with pytest.raises(InputError, match=message):
        DECODERS[name](**options)


def test_an_unknown_option_is_told_the_nearest():
    with pytest.raises(TypeError, match="D2F has no option 'tau_cnf'; did you mean tau_conf"):
        decode.D2F(tau_cnf=1)


def test_options_come_in_the_published_order_with_the_published_values():
    decoder = decode.D2F(32, 0.1, 0.95, 0.9, 256)
    assert decoder == decode.D2F(32, max_new_tokens=256)
    assert decode.Autoregressive(7).max_new_tokens == 7
    for kind in (decode.Threshold, decode.Factor, decode.EntropyBounded):
        assert kind().block_size == 32
        assert kind(block_size=None, max_new_tokens=70).size == 70
    assert (decode.Threshold().tau, decode.Factor().factor) == (0.9, 1.0)
    assert (decode.EntropyBounded().gamma, decode.EntropyBounded().proxy) == (0.1, "entropy")


def test_an_option_says_what_flags_and_grids_need():
    found = {one.name: one for one in options_of(decode.WeDLM)}
    window, verify = found["window"], found["verify"]
    assert (window.kind, window.default, window.unit, window.search) == (int, 16, "N", (8, 16))
    assert window.shown == "as trained here, else 16" and window.is_number
    assert (verify.kind, verify.may_be_none, verify.shown) == (("ar",), True, "off")
    assert found["top_p"].above and not verify.is_number
    assert default_grid(decode.D2F)["tau_add"] == (0.1, 0.5)

    @dataclass(frozen=True)
    class Odd(decode.Autoregressive):
        size: str = option("a", "no number, no words")

    with pytest.raises(InputError, match="option size of a decoder must be annotated as int"):
        options_of(Odd)


def test_a_type_checker_sees_every_decoder():
    """`decode.NAME` is found at run time; the imports for type checkers are written by hand."""
    source = Path(decode.__file__).read_text(encoding="utf-8")
    for kind in DECODERS.values():
        names = [line for line in source.splitlines() if f"from {kind.__module__} import" in line]
        assert len(names) == 1 and kind.__name__ in names[0]
        assert kind.__name__ in decode.__all__ and getattr(decode, kind.__name__) is kind


def test_a_decoder_of_ones_own_is_found_by_module_and_class():
    kind = find_decoder("random_k:RandomK")
    assert qualified_name(kind) == "random_k:RandomK"
    assert qualified_name(decode.Static) == "static"
    found = decode.generate(random_model("llada"), [[9, 10]], kind(4, 8, k=3))[0]
    assert len(found.raw_tokens) == 8 and found.forwards == 4
    for name, said in (
        ("beam", "decoder: got 'beam'; expected one of autoregressive, "),
        ("random_k:Nothing", "cannot be imported: AttributeError"),
        ("random_k:RandomKSession", "expected a subclass of decode.Decoder"),
        ("no_module:X", "cannot be imported: ModuleNotFoundError"),
        (7, "got 7"),
    ):
        with pytest.raises(InputError, match=said):
            find_decoder(name)


def test_a_decoder_of_ones_own_may_lie_in_the_working_folder(tmp_path, monkeypatch):
    source = "from decode import Static\n\nclass Near(Static):\n    name = 'near'\n"
    (tmp_path / "near_by.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    assert find_decoder("near_by:Near").name == "near"


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({}, "static"),
        ({"objective": "masked_diffusion", "prompt_rule": "block"}, "static"),
        ({"objective": "d2f", "block_size": 8}, "d2f"),
        ({"objective": "d2f"}, "d2f"),
        ({"objective": "wino_plus"}, "threshold"),
        ({"prompt_rule": "causal", "objective": "wedlm"}, "wedlm"),
        ({"prompt_rule": "block_causal", "block_size": 4}, "block"),
        ({"prompt_rule": "causal", "mask_id": None}, "autoregressive"),
        ({"prompt_rule": "causal", "mask_id": None, "draft_id": 1}, "self_draft"),
    ],
)
def test_the_default_decoder_suits_the_model(facts, name):
    contract = replace(CONTRACT, **facts)
    assert default_decoder(contract) is DECODERS[name]
    as_decoder(None, contract).check(contract)


@pytest.mark.parametrize(
    ("name", "objective", "expected"),
    [
        ("wedlm", "wedlm", decode.WeDLM(window=6)),
        ("wedlm", None, decode.WeDLM()),
        ("threshold", "wino_plus", decode.Threshold(6)),
        ("threshold", "d2f", decode.Threshold()),
        ("d2f", "d2f", decode.D2F(6)),
    ],
)
def test_a_decoder_by_name_has_what_follows_from_the_model(name, objective, expected):
    assert as_decoder(name, replace(CONTRACT, objective=objective, block_size=6)) == expected


LLADA, STUDENT, SDAR = random_model("llada"), student("dream", 4, 0), sdar(4, 0)
REFUSED = [
    (decode.D2F(), random_model("causal"), "d2f needs a model with a mask id, .* autoregressive"),
    (decode.Autoregressive(), LLADA, "autoregressive needs a causal model"),
    (decode.Static(), wedlm(False, 0), "static needs .* wedlm is causal: take wedlm"),
    (decode.Wino(), wedlm(False, 0), "wino needs a bidirectional or block-causal model"),
    (decode.Threshold(), random_model("causal"), "causal has none: take autoregressive"),
    (decode.FreeDave(eager=True), LLADA, "eager drafts need a block-causal model"),
    (decode.Block(), LLADA, "llada is bidirectional: take static"),
    (decode.Block(), wedlm(False, 0), "wedlm is causal: take wedlm"),
    (decode.Block(), random_model("causal"), "block needs a model with a mask id"),
    (decode.Block(denoising_steps=5), SDAR, "at most the block size 4, got 5"),
    (decode.WeDLM(), LLADA, "llada is bidirectional: take static or d2f"),
    (decode.WeDLM(), STUDENT, "dream is block-causal: take block"),
    (decode.WeDLM(), SDAR, "sdar is absolute block-causal: take block"),
    (decode.WeDLM(), random_model("causal"), "wedlm needs a model with a mask id"),
]


@pytest.mark.parametrize(("decoder", "model", "message"), REFUSED)
def test_a_model_that_cannot_be_decoded_is_refused_with_the_decoder_to_take(
    decoder, model, message
):
    with pytest.raises(InputError, match=message):
        decode.generate(model, [[5]], decoder)


def test_the_positions_after_a_response_are_within_the_context():
    """A window of the official refill reaches past max_new_tokens."""
    model = wedlm(False, 0)
    decoder = decode.WeDLM(window=MOST, refill="repository", max_new_tokens=9)
    with pytest.raises(InputError, match="max_new_tokens=9 and 1048575 positions after them"):
        decode.generate(model, [[5]], decoder)
    with pytest.raises(InputError, match="no room for a response"):
        decode.generate(model, [[5]], replace(decoder, max_new_tokens=None))


# Sixty-fourths, with many ties: every sum below is exact.
parts = st.integers(0, 64).map(lambda n: n / 64)
confidences = st.lists(parts, min_size=1, max_size=12).map(lambda v: np.array(v, np.float32))
entropies = st.lists(st.integers(0, 256).map(lambda n: n / 64), min_size=1, max_size=12)
bounds = st.integers(0, 512).map(lambda n: n / 64)


def first_best(values: np.ndarray) -> int:
    return max(range(len(values)), key=lambda i: (values[i], -i))


@given(confidences, parts | st.just(1.5))
def test_the_threshold_takes_the_surest_and_all_that_reach_tau(confidence, tau):
    expected = {i for i, c in enumerate(confidence) if c >= tau} | {first_best(confidence)}
    assert set(sure(confidence, tau)) == expected


@given(confidences, bounds)
def test_the_factor_takes_the_longest_prefix_of_the_ranking_that_passes(confidence, factor):
    ranked = sorted(range(len(confidence)), key=lambda i: -confidence[i])
    count = 1
    while count < len(ranked) and confidence[ranked[count]] >= 1 - factor / (count + 2):
        count += 1
    assert sure_together(confidence, factor).tolist() == ranked[:count]


@given(entropies, bounds, st.data())
def test_the_bound_takes_the_longest_prefix_of_any_order(entropy, gamma, data):
    """Brute force over all prefixes; the longest is found by counting since the bounded sum never
    falls."""
    h = np.array(entropy, np.float32)
    order = data.draw(st.permutations(range(len(h))))
    error = np.empty(len(h), np.float32)
    error[order] = np.arange(len(h))
    sums = [sum(h[order[:n]]) - max(h[order[:n]]) for n in range(1, len(h) + 1)]
    assert sums == sorted(sums)
    count = max(n for n, value in enumerate(sums, 1) if value <= gamma)
    assert bounded(h, error, gamma).tolist() == order[:count]


@given(st.lists(st.floats(0, 3, width=32), min_size=1, max_size=9), st.integers(0, 8))
def test_the_entropy_bound_is_summed_as_in_the_reference(entropy, rank):
    """One after the other in fp64, whatever Python's own `sum` does."""
    h = np.array(entropy, np.float32)
    ordered = np.sort(h).astype(np.float64)
    gamma = float((np.cumsum(ordered) - np.maximum.accumulate(ordered))[rank % len(h)])
    guesses = [Guess(p, 9, 0.5, float(value), 0.5) for p, value in enumerate(h)]
    expected = _entropy(guesses, decode.EntropyBounded(gamma=gamma), 0, len(h))
    assert bounded(h, h, gamma).tolist() == [guess.position for guess in expected]


def test_an_entropy_just_below_0_is_0():
    """Rounding in fp32 must not make room for another token."""
    h = np.array([-1e-6, -1e-6, 0.25, 0.25], np.float32)
    assert bounded(h, h, 0.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("proxy", "first"), [("entropy", [0]), ("confidence", [1]), ("margin", [2])]
)
def test_the_proxy_says_what_the_entropy_bound_sorts_by(proxy, first):
    session = decode.EntropyBounded(gamma=0.0, proxy=proxy, max_new_tokens=3).begin([5], CONTRACT)
    assert session.step().uncertainty
    values = ([0.1, 0.9, 0.2], [1.0, 2.0, 3.0], [0.1, 0.2, 0.9])
    confidence, entropy, margin = (np.array(v, np.float32) for v in values)
    session.accept(Predictions(np.array([7, 8, 9]), confidence, entropy=entropy, margin=margin))
    assert [revealed.position for revealed in session.revealed] == first


@given(st.integers(1, 64), st.integers(1, 64))
def test_static_counts_are_even_and_complete(masked, steps):
    counts = [reveal_count(masked, steps, done) for done in range(min(masked, steps))]
    assert sum(counts) == masked
    assert max(counts) - min(counts) <= 1 and min(counts) > 0
    assert counts == sorted(counts, reverse=True)
    assert reveal_count(masked, steps, steps) == masked // steps


def just_below(confidence: float) -> float:
    """A threshold that only fp32 cannot tell from a confidence."""
    return float(np.nextafter(confidence, 0))


@pytest.mark.parametrize(
    ("make", "above"),
    [
        (lambda tau: decode.D2F(2, tau_conf=tau, max_new_tokens=2), 1),
        (lambda tau: decode.Block(2, tau=tau, max_new_tokens=2, align="prompt"), 1),
        (lambda tau: decode.Wino(2, 2, tau1=tau, caps=False), 2),
        (lambda tau: decode.Threshold(2, 2, tau=tau), 2),
    ],
)
def test_a_threshold_is_rounded_as_the_official_codes_round_it(make, above):
    """D2F and SDAR compare fp32 tensors with it, WINO and Fast-dLLM fp64 ones."""
    confidence = torch.tensor([0.3, 0.9])
    tau = just_below(float(confidence[0]))
    official = confidence if above == 1 else confidence.double()
    assert int((official > tau).sum()) == above
    session = make(tau).begin([5], CONTRACT)
    session.step()
    session.accept(Predictions(np.array([9, 9]), confidence.numpy()))
    assert len(session.revealed) == above


def confident(step: Step, first: int) -> Predictions:
    """Predict the first so many above every threshold that these tests have."""
    confidence = np.where(np.arange(len(step.read)) < first, 0.9, 0.1).astype(np.float32)
    return Predictions(np.full(len(step.read), 9), confidence)


def test_k_of_n_decoded_reach_a_threshold_of_k_nths():
    """Appending and activating, for every k; and one token fewer does not reach it."""
    for size in range(1, 65):
        for k in range(1, size):
            decoder = decode.D2F(size, k / size, k / size, 0.5, max_new_tokens=2 * size)
            session = decoder.begin([5], CONTRACT)
            session.accept(confident(session.step(), k - 1))
            session.step()
            if k > 1:  # with none above the threshold one is forced
                assert [block.state for block in session.blocks()] == ["fully active"]
                session.accept(confident(session.step(), 1))
                session.step()
            assert [block.state for block in session.blocks()] == ["fully active"] * 2


def first_confidences(model, prompt, decoder) -> list[float]:
    """List those that the first forward reveals when everything is above its threshold."""
    event = next(iter(decode.stream(model, [prompt], decoder)))
    return [revealed.confidence for revealed in event.revealed]


@settings(max_examples=15)
@given(
    st.sampled_from(["llada", "dream"]),
    st.lists(st.integers(2, 200), min_size=1, max_size=8),
    st.integers(0, 5),
    st.sampled_from(["d2f", "d2f revoking", "block", "wino"]),
)
def test_a_confidence_on_the_threshold_is_decided_as_in_the_reference(family, prompt, rank, name):
    model = copy.deepcopy(student(family, 6, 0) if name == "block" else random_model(family))
    model.backbone.double()  # forwards of other shapes then agree in every bit of fp32
    make, reference = {
        "d2f": (lambda tau: decode.D2F(6, 0.1, 0.9, tau, 12), decode_d2f),
        "d2f revoking": (
            lambda tau: decode.D2F(6, 0.1, 0.9, tau, 12, revoke="commit", tau_revoke=0.2),
            decode_d2f_revoking,
        ),
        "block": (lambda tau: decode.Block(6, None, "dynamic", tau, 12), decode_block),
        "wino": (
            lambda tau: decode.Wino(6, 12, tau1=tau, tau2=0.0, caps=False),
            decode_wino,
        ),
    }[name]
    found = first_confidences(model, prompt, make(0.0))
    decoder = make(just_below(found[rank % len(found)]))
    result = decode.generate(model, [prompt], decoder)[0]
    raw = reference(model, prompt, decoder)
    raw = raw[0] if isinstance(raw, tuple) else raw
    assert result.raw_tokens == [token for token in raw if token is not None]


@given(
    st.lists(st.floats(0, 3, width=32), min_size=1, max_size=9),
    st.floats(0, 1),
    st.integers(0, 8),
    st.integers(1, 9),
)
def test_wedlm_adds_its_penalty_as_the_official_code_does(entropy, penalty, rank, stride):
    """fp32 throughout; the threshold is one of the sums itself, so rounding decides."""
    h, distance = torch.tensor(entropy), torch.arange(len(entropy)).float() * stride
    official = h + distance * penalty
    threshold = float(official[rank % len(entropy)])
    chosen = (official < threshold).nonzero().flatten().tolist() or [int(official.argmin())]
    decoder = decode.WeDLM(entropy_threshold=threshold, distance_penalty=penalty)
    session = decoder.begin([5], CONTRACT)
    masks = 7 + stride * np.arange(len(entropy))
    assert session.choose(masks, h.numpy()).tolist() == chosen
