"""What is asked: models, decoders, prompts, lengths, stops and sampling, drawn from a seed, and
what `decode.generate` answers to each alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import decode
from d2f.model import DiffusionModel
from d2f.tasks import DEFAULT_TASKS, make_problems
from decode.cli import DecoderSettings
from decode.step import Result

DECODERS: dict[str, list[dict[str, Any]]] = {
    "tiny-d2f": [
        {},  # the server's own choice
        {"decoder": "d2f", "tau_conf": 0.7},
        {"decoder": "d2f", "tau_conf": 0.97, "tau_add": 0.5, "block_size": 8},
        {"decoder": "d2f", "tau_conf": 0.6, "revoke": "commit", "tau_revoke": 0.8},
        {"decoder": "block", "tau": 0.8},
        {"decoder": "threshold", "tau": 0.8, "block_size": 8, "cache": "prefix"},
        {"decoder": "wino", "block_size": 16},
        {"decoder": "entropy", "block_size": 16},
        {"decoder": "static", "block_size": 4},
    ],
    "tiny-ar": [{}, {"decoder": "autoregressive"}],
    "tiny-wedlm": [{}, {"decoder": "wedlm", "window": 8}, {"decoder": "autoregressive"}],
}
"""The models of a soak, and for each what its requests choose from: fields of the request."""
LENGTHS = (1, 5, 12, 20, 32, 48)
STOPS: tuple[Any, ...] = (None, None, None, "\n", ["####", " ="], [".", "the"])
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
)
UNREAD = ("model", "messages", "prompt", "logprobs", "top_logprobs")  # by a decoder


@dataclass(frozen=True)
class Question:
    """One request without how it is sent. body: its fields. prompts: what `decode.generate` is
    given for it."""

    path: str
    body: dict[str, Any]
    prompts: list[Any]


def draw_questions(models: Mapping[str, DiffusionModel], count: int, seed: int) -> list[Question]:
    """Questions to these of `DECODERS`' models, the first one the most asked."""
    rng = np.random.default_rng(seed)
    problems = (make_problems(task, "heldout", 64, seed=seed) for task in DEFAULT_TASKS)
    texts = [problem.question for some in problems for problem in some]
    names = list(models)
    weights = np.array([2.0] + [1.0] * (len(names) - 1))
    return [
        _draw(rng, models, names[rng.choice(len(names), p=weights / weights.sum())], texts)
        for _ in range(count)
    ]


def _draw(
    rng: np.random.Generator,
    models: Mapping[str, DiffusionModel],
    name: str,
    texts: Sequence[str],
) -> Question:
    sampling = SAMPLING[rng.integers(len(SAMPLING))]
    stop = STOPS[rng.integers(len(STOPS))]
    body: dict[str, Any] = {
        "model": name,
        **DECODERS[name][rng.integers(len(DECODERS[name]))],
        **sampling,
        **({} if stop is None else {"stop": stop}),
    }
    if sampling.get("temperature"):
        # Without a seed the answer is drawn anew each time: nothing could be compared.
        body |= {"seed": int(rng.integers(2**31)), "n": int(rng.choice([1, 1, 2, 3]))}
    length = int(rng.choice(LENGTHS))
    logprobs = rng.random() < 0.15
    text = texts[rng.integers(len(texts))]
    tokenizer: Any = models[name].tokenizer
    form = rng.choice(["chat", "chat", "text", "ids", "several"])
    if form == "chat":
        messages = [{"role": "user", "content": text}]
        body |= {"logprobs": True, "top_logprobs": 1} if logprobs else {}
        limit = str(rng.choice(["max_tokens", "max_completion_tokens"]))
        return Question(
            "chat/completions", body | {"messages": messages, limit: length}, [messages]
        )
    body |= {"logprobs": 1} if logprobs else {}
    # As text: the template's special tokens are tokens in a prompt, too.
    prompt: Any = f"<|user|>{text}<|assistant|>"
    if form != "text":
        prompt = tokenizer(prompt)["input_ids"]
    if form == "several":
        prompt = [prompt, prompt[: len(prompt) // 2]]
    prompts = prompt if form == "several" else [prompt]
    return Question("completions", body | {"prompt": prompt, "max_tokens": length}, prompts)


def answer(model: DiffusionModel, question: Question) -> list[Result]:
    """What `decode.generate` answers, a request at a time, in the order of the choices."""
    body = dict(question.body)
    length = body.pop("max_tokens", None) or body.pop("max_completion_tokens")
    name, n = body.pop("decoder", None), body.pop("n", 1)
    given = {name: value for name, value in body.items() if name not in UNREAD}
    decoder = DecoderSettings(name, given).decoder(model, length)
    return decode.generate(model, question.prompts, decoder, n=n, raw=True, batch_size=1)
