"""lm-eval asks our server as it asks any other, and scores what it scores in our process."""

from __future__ import annotations

import pytest

pytest.importorskip("tenacity", reason="needs lm-eval[api]")

from harness_requests import generation, likelihood
from lm_eval.models.openai_completions import LocalCompletionsAPI
from serving import QUESTION

from d2f.models import HERE
from decode.lm_eval import D2FLM


def completions(address, name, **more):
    return LocalCompletionsAPI(
        base_url=f"{address}/v1/completions", model=name, tokenizer=str(HERE / name),
        tokenizer_backend="huggingface", max_length=512, **more,
    )  # fmt: skip


def test_answers_are_those_of_our_process(address, tiny_ar):
    """Asked with ids, which AutoTokenizer makes of a shipped folder."""
    texts = [f"<|user|>{QUESTION}<|assistant|>", "Ann has 3"]
    requests = [generation(text, max_gen_toks=16) for text in texts]
    ours = D2FLM(tiny_ar).generate_until(requests, True)
    theirs = completions(address, "tiny-ar", batch_size=2).generate_until(requests, True)
    assert theirs == ours and all(ours)


def test_likelihoods_are_those_of_our_process(address, tiny_ar):
    """Which the server gives as those of an echo."""
    model, texts = D2FLM(tiny_ar), [f"<|user|>{QUESTION}<|assistant|>", "Ann has 3"]
    (answer,) = model.generate_until([generation(texts[0], max_gen_toks=16)], True)
    requests = [
        likelihood(context, continuation, document=i)
        for i, context in enumerate(texts)
        for continuation in (answer, answer[:-1], " apples.", " 15")
    ]
    ours = model.loglikelihood(requests, True)
    theirs = completions(address, "tiny-ar", batch_size=2).loglikelihood(requests, True)
    assert [greedy for _, greedy in theirs] == [greedy for _, greedy in ours]
    assert (
        ours[0][1] and ours[1][1]
    )  # its own answer, which an end token follows, and its beginning
    # In another batch sums are rounded elsewhere.
    assert [v for v, _ in theirs] == pytest.approx([v for v, _ in ours], rel=1e-5)
