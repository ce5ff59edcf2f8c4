"""lm-eval asks our server as it asks any other, and scores what it scores in our process."""

from __future__ import annotations

import pytest

pytest.importorskip("tenacity", reason="needs lm-eval[api]")

import lm_eval
from harness_requests import generation, likelihood
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from serving import QUESTION

from d2f.models import HERE
from decode.lm_eval import D2FLM, TASKS

LIMIT = 8


def completions(address, name, **more):
    return LocalCompletionsAPI(
        base_url=f"{address}/v1/completions", model=name, tokenizer=str(HERE / name),
        tokenizer_backend="huggingface", max_length=512, **more,
    )  # fmt: skip


def answers(model):
    found = lm_eval.simple_evaluate(
        model, tasks=["d2f_story"], limit=LIMIT, apply_chat_template=True, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
    )  # fmt: skip
    return found["results"]["d2f_story"], found["samples"]["d2f_story"]


def test_answers_and_scores_are_those_of_our_process(address, tiny_d2f):
    """Completions are asked with ids, which AutoTokenizer makes of a shipped folder; chats with
    messages."""
    ours, samples = answers(D2FLM(tiny_d2f))
    for client in (
        completions(address, "tiny-d2f", batch_size=3),
        LocalChatCompletion(base_url=f"{address}/v1/chat/completions", model="tiny-d2f"),
    ):
        theirs, found = answers(client)
        assert theirs["solved,none"] == ours["solved,none"] > 0
        assert [one["resps"] for one in found] == [one["resps"] for one in samples]


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
