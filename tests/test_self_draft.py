"""Self-drafting: clean rows are the base's to the bit, and what is decoded is the original's."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from block_tiny import LAYERS as ALL
from block_tiny import drafting
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import fresh_model, random_model

import d2f
import decode
from d2f import spans as sp
from d2f.adapters import new_lora
from d2f.attention import SpanPlan
from d2f.contract import DRAFT
from d2f.errors import CheckpointError, CompileError, InputError
from decode.decoders.self_draft import SelfDraftSession
from decode.step import Predictions
from distill.config import parse_config
from distill.data.samples import Placed, Sample
from distill.objectives.self_draft import SelfDraft, make_self_drafting

NEW = 24  # tokens
PROMPTS = [[8 + (7 * i + j) % 200 for j in range(3 + 9 * i)] for i in range(4)]


@pytest.fixture(scope="module")
def model():
    return drafting()


@pytest.fixture(scope="module")
def compiled():
    found = drafting()
    found.compile()
    return found


def tokens(model, decoder, prompts=PROMPTS, **how):
    return [r.raw_tokens for r in decode.generate(model, prompts, decoder, **how)]


@pytest.fixture(scope="module")
def greedy():
    """What the model without an adapter gives."""
    return tokens(random_model("causal"), decode.Autoregressive(NEW))


# What is decoded.

SETTINGS = st.fixed_dictionaries({
    "rows": st.integers(1, 20),
    "drafts": st.sampled_from([None, 1, 2, 3]),
    "placement": st.sampled_from(["expected", "linear", "quadratic"]),
    "lookup": st.sampled_from([1, 2, 4, 8]),
})  # fmt: skip


@settings(max_examples=10)
@given(options=SETTINGS, batch=st.integers(1, 4), most=st.sampled_from([None, 1, 5, 13]))
def test_greedy_tokens_are_the_original_models(model, greedy, options, batch, most):
    decoder = decode.SelfDraft(max_new_tokens=NEW, **options)
    assert tokens(model, decoder, batch_size=batch, max_rows=most) == greedy


def test_without_an_adapter_repetitions_are_looked_up():
    """The tokens of any causal model, in fewer forwards where its text repeats itself."""
    base, new = fresh_model("causal"), 100
    for name, weight in base.backbone.named_parameters():
        if "down_proj" in name or "o_proj" in name:
            torch.nn.init.zeros_(weight)  # a token follows from the one before: it ends in a loop
    results = decode.generate(base, PROMPTS, decode.SelfDraft(max_new_tokens=new))
    want = tokens(base, decode.Autoregressive(new))
    assert [r.raw_tokens for r in results] == want
    assert sum(r.forwards for r in results) < 0.7 * sum(map(len, want))
    assert all(r.counts["draft_rows"] == 0 for r in results)


@settings(max_examples=6)
@given(options=SETTINGS, seed=st.integers(0, 9), filtered=st.booleans())
def test_drawn_tokens_are_those_of_decoding_one_by_one(model, options, seed, filtered):
    """With the same seed: not the distribution alone, each token."""
    how = {"temperature": 0.9, "seed": seed, "max_new_tokens": NEW}
    how |= {"top_k": 9, "top_p": 0.8} if filtered else {}
    want = tokens(random_model("causal"), decode.Autoregressive(**how))
    assert tokens(model, decode.SelfDraft(**how, **options), batch_size=3) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_lossless_too(dtype):
    """In bf16 as well: a row of the forward in C++ has the same bits whatever is beside it."""
    plain, ours = fresh_model("causal"), drafting(dtype=dtype)
    plain.backbone.to(dtype)
    for each in (plain, ours):
        each.compile()
    for how in ({}, {"temperature": 0.9, "seed": 3}):
        want = tokens(plain, decode.Autoregressive(NEW, **how))
        for rows, batch in ((4, 4), (9, 1)):
            decoder = decode.SelfDraft(rows=rows, max_new_tokens=NEW, **how)
            assert tokens(ours, decoder, batch_size=batch) == want, (how, rows, batch)


def test_drafts_are_taken(model, greedy):
    """Not by chance alone: a draft row behind the text is what its confidence says."""
    results = decode.generate(model, PROMPTS, decode.SelfDraft(rows=9, max_new_tokens=NEW))
    counts = [result.counts for result in results]
    assert sum(c["accepted"] for c in counts) > 0 < sum(c["rejected"] for c in counts)
    assert sum(r.forwards for r in results) < sum(map(len, greedy))


def test_confidences_are_the_original_models(model):
    def found(m, decoder):
        return [
            r.confidence for event in decode.stream(m, PROMPTS[:1], decoder) for r in event.revealed
        ]

    want = found(random_model("causal"), decode.Autoregressive(20))
    np.testing.assert_allclose(found(model, decode.SelfDraft(max_new_tokens=20)), want, rtol=1e-4)


# Which rows are fed.


def session(trained=2, length=30, **options):
    contract = dataclasses.replace(random_model("causal").contract, draft_id=1, block_size=trained)
    return SelfDraftSession(decode.SelfDraft(max_new_tokens=length, **options), [5, 6, 7], contract)


def answer(step, token=9, confidence=0.5):
    rows = len(step.read)
    return Predictions(np.full(rows, token), np.full(rows, confidence, dtype=np.float32))


def test_the_rows_of_the_docstrings_example():
    one = session(trained=2, rows=9, placement="quadratic")
    one.accept(answer(one.step()))  # the prompt and two draft rows: the first token, two drafts
    step = one.step()
    assert step.tokens.tolist() == [9, 9, 9, *[DRAFT] * 6]
    assert step.positions.tolist() == [3, 4, 5, 4, 5, 5, 6, 6, 7]
    assert step.slots.tolist() == [3, 4, 5, *range(33, 39)]
    assert step.spans[4].tolist() == [[0, 4], [33, 35]] and step.spans[6].tolist()[0] == [0, 5]
    assert step.read.tolist() == list(range(9)) and step.cached == 3
    assert step.draws.tolist() == [1, 2, 3, 2, 3, 3, 4, 4, 5]


def test_the_likeliest_rows_are_fed():
    """Sure drafts need no draft rows behind the clean rows before them, unsure ones do."""
    for chance, want in ((0.99, [0, 0, 2]), (0.3, [2, 0, 0])):
        one = session(trained=2, rows=5)
        one.accept(answer(one.step(), confidence=chance))
        assert one.place(5, 20)[: len(want)] == want, chance


@settings(max_examples=60)
@given(SETTINGS, st.integers(1, 12), st.lists(st.floats(0, 1), min_size=3, max_size=3))
def test_no_more_rows_than_asked_and_none_behind_the_end(options, left, chances):
    one = session(trained=3, **options)
    one.drafted, one.chances = np.arange(3), np.array(chances)
    groups = one.place(one.most_rows, left)
    assert len(groups) + sum(groups) <= max(1, options["rows"])
    assert all(i + count < left for i, count in enumerate(groups)) and len(groups) <= 4
    assert max(groups) <= (options["drafts"] or 3)


def test_a_row_must_pay_where_few_are_nearly_free():
    one = session(trained=2, rows=9)
    one.drafted, one.chances = np.arange(3), np.array([0.9, 0.9, 0.5])
    fed = {}
    for share in (100.0, 4.0, 1.0, 0.5):
        one.share = share
        groups = one.place(9, 20)
        fed[share] = len(groups) - 1, sum(groups)
    assert fed == {100.0: (3, 5), 4.0: (3, 0), 1.0: (2, 0), 0.5: (0, 0)}


@pytest.mark.parametrize(("text", "want"), [
    ([5, 6, 7, 8, 5, 6], [7, 8, 5, 6]),  # the last place, and on as it began
    ([1, 5, 6, 7, 2, 5, 6, 8, 1, 5, 6], [7, 2, 5, 6]),  # the longest end: 1 5 6
    ([1, 5, 6, 7, 2, 5, 6, 8, 3, 5, 6], [8, 3, 5, 6]),  # of two that are as long the later
    ([9, 9, 9], [9, 9, 9, 9]),
    ([5, 6, 7, 6], []),  # one token alone
    ([5], []),
])  # fmt: skip
def test_what_followed_the_same_tokens_is_drafted(text, want):
    one = session(rows=5)
    one.x[: len(text)], one.known = text, len(text)
    one.look_up(2)
    assert one.drafted.tolist() == want


# The adapter and its rows.


def test_clean_rows_are_the_bases_to_the_bit(model, compiled):
    """Beside draft rows, whose own logits the adapter changes."""
    base = fresh_model("causal")
    fed = torch.tensor([5, 9, DRAFT, DRAFT, 12])
    positions, slots = torch.tensor([0, 1, 2, 3, 2]), torch.arange(5)
    spans = torch.tensor(
        [[[0, 1], [0, 0]], [[0, 2], [0, 0]], [[0, 2], [2, 3]], [[0, 2], [2, 4]], [[0, 2], [4, 5]]],
        dtype=torch.int32,
    )
    native = fresh_model("causal")
    native.compile()
    for ours, plain in ((model, base), (compiled, native)):
        found = []
        for each, tokens in ((ours, fed), (plain, torch.where(fed == DRAFT, 1, fed))):
            cache = each.new_cache(5)
            cache.slots = slots
            with torch.inference_mode():
                logits = each.decode_rows(tokens, positions, SpanPlan(spans), cache, slots)
            found.append((logits, cache.layers[1][0]))
        (got, keys), (want, its) = found
        assert torch.equal(got[[0, 1, 4]], want[[0, 1, 4]])
        assert torch.equal(keys[:, :, [0, 1, 4]], its[:, :, [0, 1, 4]])
        assert not torch.allclose(got[2:4], want[2:4], atol=0.01)


@pytest.mark.parametrize("targets", [ALL, ("v_proj", "down_proj"), ("k_proj", "up_proj")])
def test_the_forward_in_cpp_has_the_adapter(targets):
    ours, plain = drafting(targets=targets), drafting(targets=targets)
    ours.compile()
    rows = torch.arange(9)
    fed = torch.where(rows % 3 == 1, DRAFT, rows + 20)
    logits = []
    for each in (ours, plain):
        cache = each.new_cache(9)
        cache.slots = rows
        plan = SpanPlan(sp.causal(9))
        with torch.inference_mode():
            logits.append(each.decode_rows(fed, rows, plan, cache, torch.tensor([1, 0, 7, 8])))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_saved_adapter_decodes_the_same(model, greedy, tmp_path):
    base = fresh_model("causal")
    base.save(tmp_path / "base")
    trained = d2f.load(tmp_path / "base", device="cpu")
    new_lora(trained, r=3, alpha=6, dropout=0.0, targets=ALL)
    make_self_drafting(trained)
    trained.adapter.load_state_dict(model.adapter.state_dict())
    trained.contract = dataclasses.replace(trained.contract, objective="self_draft", block_size=3)
    trained.save(tmp_path / "adapter")
    again = d2f.load(tmp_path / "adapter", device="cpu")
    again.merge_adapter()  # it stays beside the weights
    assert again.gate is not None and "self_draft" in repr(again)
    decoder = decode.SelfDraft(max_new_tokens=NEW)
    results = decode.generate(again, PROMPTS, decoder)
    assert [r.raw_tokens for r in results] == greedy
    assert [r.counts for r in results] == [
        r.counts for r in decode.generate(model, PROMPTS, decoder)
    ]
    assert decode.generate(again, PROMPTS)[0].counts.keys() == results[0].counts.keys()
    with pytest.raises(InputError, match="stays beside the weights"):
        d2f.load(tmp_path / "adapter", device="cpu", quantize="int8-weight")


def test_what_does_not_go_together_is_said(model):
    with pytest.raises(InputError, match="the decoder self_draft needs a causal model"):
        decode.generate(random_model("llada"), PROMPTS, "self_draft")
    other = fresh_model("causal")
    from peft import LoraConfig, PeftModel

    dora = LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    other.adapter = PeftModel(other.backbone, dora)
    with pytest.raises(CheckpointError, match="expected a plain LoRA"):
        make_self_drafting(other)
    on_gpu_only = drafting()
    on_gpu_only.backbone.model.layers[0].register_forward_hook(lambda *a: None)
    with pytest.raises(CompileError, match="one call of C"):
        on_gpu_only.compile()


# Training.


def objective(model, **options):
    values = {
        "objective": {"name": "self_draft", "drafts": 3, **options},
        "init": "tiny-ar", "output": "-", "steps": 1,
        "data": {"tasks": {"story": 1.0}, "rows": 2, "row_length": 40},
    }  # fmt: skip
    return SelfDraft(model, parse_config(values, "test"))


SAMPLES = [
    Sample(0, [8, 9, 10], [20, 21, 22, 23, 24, 25, 26, 0], 8),
    Sample(1, [30], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 0], 12),
    Sample(2, [50, 51, 52, 53], [54, 0], 2),
]
ROWS = [[Placed(SAMPLES[0], 0), Placed(SAMPLES[1], 11)], [Placed(SAMPLES[2], 0)]]


@pytest.mark.parametrize("weights", [None, (1.0, 0.5, 0.25)])
def test_loss_is_that_of_draft_rows_fed_one_group_at_a_time(model, weights):
    """Each anchor's text and draft rows alone, causally: what decoding feeds."""
    one = objective(model, weights=weights)
    got = one.forward(one.batch(ROWS, slice(0, 2)))
    total = weight_sum = 0.0
    base = random_model("causal")
    for sample in SAMPLES:
        text = sample.prompt + sample.response
        clean = base.forward(torch.tensor([text]), sp.causal(len(text)))[0].log_softmax(-1)
        anchors = one.anchors(sample)
        assert len(anchors) == min(len(sample.response) - 1, len(text) // 3)
        for anchor in anchors:
            fed = torch.tensor([*text[: anchor + 1], DRAFT, DRAFT, DRAFT])
            model.gate.rows = None
            logits = model.forward(model.gate.open(fed[None]), sp.causal(len(fed)))[0]
            drafted = logits.log_softmax(-1)
            for k in range(3):
                place = anchor + 1 + k
                if place >= len(text) - 1:
                    continue
                of, by = clean[place], drafted[place]
                weight = (weights or (1, 1, 1))[k]
                total += weight * (of.exp() * (of - by)).sum().item()
                weight_sum += weight
    assert got.item() == pytest.approx(total / weight_sum, rel=1e-5)


def test_gradients_reach_the_adapter_alone(model):
    trained = drafting()
    one = objective(trained)
    one.forward(one.batch(ROWS, slice(0, 2))).backward()
    moved = {
        n for n, p in trained.backbone.named_parameters() if p.grad is not None and p.grad.any()
    }
    assert moved and all("lora_" in name for name in moved)


def test_held_out_hits_are_those_of_decoding(model):
    one = objective(model)
    batch = one.batch(ROWS, slice(0, 2))
    with torch.no_grad():
        student, teacher = one.read(batch, batch.spans), one.read_teacher(batch)
    found = one.held_out_shares(batch, student, teacher)
    hits, led, groups = [0, 0, 0], 0, 0
    base = random_model("causal")
    for sample in SAMPLES:
        text = sample.prompt + sample.response
        likeliest = base.forward(torch.tensor([text]), sp.causal(len(text)))[0].argmax(-1)
        for anchor in one.anchors(sample):
            fed = torch.tensor([*text[: anchor + 1], DRAFT, DRAFT, DRAFT])
            drafted = model.forward(model.gate.open(fed[None]), sp.causal(len(fed)))[0].argmax(-1)
            right = [
                bool(drafted[p] == likeliest[p])
                for p in range(anchor + 1, min(anchor + 4, len(text) - 1))
            ]
            for k, one_hit in enumerate(right):
                hits[k] += one_hit
            led += [*right, False].index(False)
            groups += 1
    assert [found[f"hits/{k}"][0] for k in (1, 2, 3)] == hits
    assert found["drafted_tokens_per_forward"] == (led + groups, groups)


def test_a_diffusion_model_and_wrong_weights_are_refused():
    with pytest.raises(InputError, match="trains the family causal"):
        SelfDraft.check_model(random_model("llada"), None)
    with pytest.raises(InputError, match="one for each of the 3 drafts"):
        objective(random_model("causal"), weights=(1.0,))


def test_from_prompts_to_a_resumed_training_to_decoding(tmp_path):
    """The three commands that train an adapter, and a training that was stopped in between."""
    from d2f.tasks import make_problems
    from decode.batch import main as batch
    from distill.config import read_config
    from distill.trainer import train

    prompts = tmp_path / "prompts.jsonl"
    asked = [[{"role": "user", "content": p.question}] for p in make_problems("story", "train", 6)]
    prompts.write_text("".join(json.dumps({"messages": m}) + "\n" for m in asked))
    given = ["--model", "tiny-ar", "--input", str(prompts), "--max-new-tokens", "40"]
    assert batch([*given, "--output", str(tmp_path / "answers")]) == 0

    def run(name, **stop):
        small = {
            "init": "tiny-ar", "data.file": str(tmp_path / "answers" / "answers.jsonl"),
            "output": str(tmp_path / name), "steps": "4", "data.rows": "2",
            "data.row_length": "128", "mixed_precision": "no", "base_dtype": "float32",
            "objective.lora.r": "4", "save_every": "2",
        }  # fmt: skip
        flags = [part for key, value in small.items() for part in (f"--{key}", value)]
        return train(read_config("self-draft", flags), **stop)

    run("whole")
    run("parts", stop_after=2)
    run("parts")
    whole, parts = (tmp_path / name / "adapter" for name in ("whole", "parts"))
    assert not (tmp_path / "whole" / "model").exists()
    name = "adapter_model.safetensors"
    assert (whole / name).read_bytes() == (parts / name).read_bytes()
    ours = d2f.load(whole, device="cpu")
    targets = {n.split(".")[-4] for n, _ in ours.backbone.named_parameters() if "lora_A" in n}
    assert targets == set(ALL), "a rank of one's own leaves the layers as they are"
    want = tokens(d2f.load("tiny-ar", device="cpu"), decode.Autoregressive(40), asked)
    assert [
        r.raw_tokens for r in decode.generate(ours, asked, decode.SelfDraft(max_new_tokens=40))
    ] == want
