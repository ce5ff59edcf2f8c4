"""python -m benchmarks.soak --requests 10000

Serves three models and sends thousands of mixed requests, which follow from --seed: both endpoints,
many decoders, lengths, stops, seeded sampling, streamed and not. A fifth of the clients leave at
random moments, some requests are malformed, and where the queue is full they come again. Counted
are

    lost     no answer, a stream without its end, another error than is expected
    wrong    a choice that is not what `decode.generate` gives the same request alone; of a client
             who left, what it had until then
    leaked   requests running or waiting, and slots used, when all have ended (/metrics)
    grown    MiB of resident memory from 30 % of the requests on to the end

Any of them is exit status 1; memory may grow by 3 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import parser
from benchmarks.serve_load import serving

DECODERS: dict[str, list[dict[str, Any]]] = {
    "tiny-d2f": [
        {},  # the server's own choice
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
STOPS: tuple[Any, ...] = (None, None, "\n", ["####", " ="], [".", "the"])
SAMPLING: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8}, {"temperature": 1.2, "top_k": 20})
BAD: tuple[dict[str, Any], ...] = (
    {"temperature": -1}, {"n": 0}, {"decoder": "os:system"}, {"tau_konf": 0.5},
    {"logit_bias": {"5": 1}}, {"prompt": []}, {"model": "no-such-model"}, {"prompt": [5] * 4000},
)  # fmt: skip
REASONS = {"end": "stop", "stop": "stop", "length": "length"}
GAUGES = re.compile(r"^(d2f_engine_(?:running|waiting|slots_used)\S*) (?!0\.0)", re.MULTILINE)
SECONDS = 120.0  # the longest that a request may take
SETTLE_SECONDS = 2.0  # until what clients left is gone


def draw(rng: np.random.Generator, texts: Sequence[str], tokenizer: Any) -> dict[str, Any]:
    """Draw the body of one request, which `expected` can answer alone."""
    name = str(rng.choice(list(DECODERS)))
    body = {"model": name, **rng.choice(DECODERS[name]), **rng.choice(SAMPLING)}  # type: ignore[arg-type]
    stop = STOPS[rng.integers(len(STOPS))]
    body |= {} if stop is None else {"stop": stop}
    if "temperature" in body:  # without a seed the answer would be drawn anew each time
        body |= {"seed": int(rng.integers(2**31)), "n": int(rng.choice([1, 1, 2, 3]))}
    body["max_tokens"] = int(rng.choice([1, 5, 12, 20, 48]))
    prompt: Any = f"<|user|>{rng.choice(texts)}<|assistant|>"
    ids = tokenizer(prompt)["input_ids"]
    return body | {"prompt": [prompt, ids, [prompt, ids[: len(ids) // 2]]][rng.integers(3)]}


def expected(model: Any, body: dict[str, Any]) -> list[tuple[str, str]]:
    """Decode each choice alone by `decode.generate`: its text and its end."""
    import decode
    from decode.cli import DecoderSettings

    given = {k: v for k, v in body.items() if k not in ("model", "prompt", "n", "max_tokens")}
    decoder = DecoderSettings(given.pop("decoder", None), given).decoder(model, body["max_tokens"])
    prompts = body["prompt"]
    if isinstance(prompts, str) or isinstance(prompts[0], int):
        prompts = [prompts]
    found = decode.generate(model, prompts, decoder, n=body.get("n", 1), raw=True, batch_size=1)
    return [(one.text or "", REASONS[one.finish_reason]) for one in found]


async def send(
    client: Any, body: dict[str, Any], want: list[tuple[str, str]], rng: np.random.Generator
) -> str:
    """Send one request; how it ended: answered, left, wrong, or lost and why."""
    import httpx
    import openai

    streamed, leaves = rng.random() < 0.5, rng.random() < 0.2
    extra = {k: v for k, v in body.items() if k not in ("model", "prompt")}
    texts, reasons = [""] * len(want), [""] * len(want)
    try:
        async with asyncio.timeout(float(rng.choice([0.003, 0.3])) if leaves else SECONDS):
            while True:
                try:
                    answer = await client.completions.create(
                        model=body["model"], prompt=body["prompt"], stream=streamed,
                        extra_body=extra,
                    )  # fmt: skip
                    break
                except openai.RateLimitError:  # the queue is full
                    await asyncio.sleep(0.05)
            if not streamed:
                texts = [choice.text for choice in answer.choices]
                reasons = [choice.finish_reason for choice in answer.choices]
            else:
                async for chunk in answer:
                    for choice in chunk.choices:
                        texts[choice.index] += choice.text
                        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    except TimeoutError:
        if not leaves:
            return f"lost: no end after {SECONDS:g} s: {body}"
        whole = all(w.startswith(text) for (w, _), text in zip(want, texts, strict=True))
        return "left" if whole else f"wrong: {texts} for {want}: {body}"
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return f"lost: {error!r}: {body}"
    found = list(zip(texts, reasons, strict=True))
    return "answered" if found == want else f"wrong: {found} for {want}: {body}"


async def send_bad(client: Any, body: dict[str, Any], wrong: dict[str, Any]) -> str:
    """Send a malformed request; how it ended."""
    import openai

    body = body | wrong
    extra = {k: v for k, v in body.items() if k not in ("model", "prompt")}
    named = {"model": body["model"], "prompt": body["prompt"]}
    try:
        await client.completions.create(**named, extra_body=extra)
    except (openai.BadRequestError, openai.NotFoundError):
        return "refused"
    return f"lost: a malformed request was answered: {body}"


async def soak(url: str, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    """Send all requests; the report."""
    import httpx
    import psutil
    from openai import AsyncOpenAI

    import d2f
    from d2f.tasks import make_problems

    models = {name: d2f.load(name, device="cpu") for name in DECODERS}
    rng = np.random.default_rng(options.seed)
    texts = [problem.question for problem in make_problems("story", "heldout", 64, seed=0)]
    bodies = [draw(rng, texts, models["tiny-ar"].tokenizer) for _ in range(options.distinct)]
    wanted = [expected(models[body["model"]], body) for body in bodies]
    ends: list[str] = []
    warm = 0
    began, numbers = time.perf_counter(), iter(range(options.requests))
    memory = psutil.Process(pid).memory_info
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def user() -> None:
            nonlocal warm
            for number in numbers:
                own = np.random.default_rng([options.seed, number])
                asked = int(own.integers(len(bodies)))
                if own.random() < 0.05:
                    ends.append(await send_bad(client, bodies[asked], own.choice(BAD)))  # type: ignore[arg-type]
                else:
                    ends.append(await send(client, bodies[asked], wanted[asked], own))
                if len(ends) == options.requests * 3 // 10:
                    warm = memory().rss

        await asyncio.gather(*(user() for _ in range(options.in_flight)))
    seconds = time.perf_counter() - began
    await asyncio.sleep(SETTLE_SECONDS)
    grown = memory().rss - warm
    return {
        "requests": options.requests,
        "seconds": round(seconds, 1),
        "ends": dict(Counter(end.partition(":")[0] for end in ends)),
        "first": [end for end in ends if ":" in end][:10],
        "leaked": GAUGES.findall(httpx.get(f"{url}/metrics").text),
        "grown": round(grown / 2**20, 1) if grown > 0.03 * warm else 0,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    given = parser(__doc__)
    given.add_argument("--requests", type=int, default=10_000)
    given.add_argument("--distinct", type=int, default=400, help="different ones of these")
    given.add_argument("--in-flight", type=int, default=40)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--json", type=Path, default=Path("benchmarks/results/serve/soak.json"))
    options = given.parse_args(arguments)
    few = ("--max-batch", "16", "--max-waiting", "16")  # so that the queue is full now and then
    with serving(list(DECODERS), *few) as (url, pid):
        report = asyncio.run(soak(url, pid, options))
    print(json.dumps(report, indent=1))
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(report["first"] or report["leaked"] or report["grown"]))


if __name__ == "__main__":
    sys.exit(main())
