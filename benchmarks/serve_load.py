"""python -m benchmarks.serve_load --model tiny-d2f

Measures what the server costs: visible tokens a second through HTTP, whole answers and streamed
ones, against `decode.AsyncEngine` alone, with 1, 8 and 32 requests in flight. The same prompts,
decoder and threads; server and engine are processes of their own, warm, and take turns in each
repetition. The answers must be the same to the letter. Printed is the mean share of the engine's
speed that is left, with its 95 % interval (Student's t over the repetitions' ratios).

Under arrivals at a rate: `vllm bench serve --backend openai --base-url URL --model tiny-d2f
--endpoint /v1/completions --request-rate 16 ...` and guidellm, as against any server of OpenAI's
interface.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import parser

WAYS = ("engine", "whole", "streamed")
BATCH = 32
LENGTH = 64  # most new tokens
SERVING = "serving on "


@contextmanager
def serving(models: Sequence[str], *arguments: str, threads: int = 1) -> Iterator[tuple[str, int]]:
    """Serve models in a process of its own: the address, and the process's id."""
    command = [sys.executable, "-m", "decode.serve", "--port", "0", *arguments]
    command += [part for model in models for part in ("--model", model)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if line.startswith(SERVING):
                # What it says from here on must not fill the pipe.
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield line.removeprefix(SERVING).strip(), process.pid
                return
        raise RuntimeError(f"the server ended: {''.join(said)[-2000:]}")
    finally:
        process.terminate()
        process.wait(60)


async def timed(
    ask: Callable[[list[int]], Awaitable[str]], prompts: Sequence[list[int]], users: int
) -> tuple[float, list[str]]:
    """Seconds and answers with `users` requests in flight."""
    texts = [""] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def user() -> None:
        for number, prompt in waiting:
            texts[number] = await ask(prompt)

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    return time.perf_counter() - began, texts


async def measure(url: str, options: argparse.Namespace) -> dict[str, dict[int, list[float]]]:
    """Tokens a second of each way, by requests in flight, a number for each repetition."""
    import torch
    from openai import AsyncOpenAI

    import d2f
    import decode
    from d2f.tasks import make_problems
    from decode.decoders import default_decoder

    torch.set_num_threads(options.threads)
    model = d2f.load(options.model)
    model.merge_adapter()
    kind = default_decoder(model.contract)
    decoder: Any = kind(**kind.with_model_defaults({"max_new_tokens": LENGTH}, model.contract))
    tokenizer: Any = model.tokenizer
    questions = [p.question for p in make_problems("story", "heldout", options.problems, seed=0)]
    prompts = [tokenizer(f"<|user|>{question}<|assistant|>")["input_ids"] for question in questions]
    speeds: dict[str, dict[int, list[float]]] = {way: {} for way in WAYS}
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    async with client, decode.AsyncEngine(model, batch_size=BATCH) as engine:

        async def alone(prompt: list[int]) -> str:
            text = ""
            async for event in engine.generate(prompt, decoder):
                text = text if event.result is None else event.result.text or ""
            return text

        async def whole(prompt: list[int]) -> str:
            answer = await client.completions.create(
                model=options.model, prompt=prompt, max_tokens=LENGTH
            )
            return answer.choices[0].text

        async def streamed(prompt: list[int]) -> str:
            chunks = await client.completions.create(
                model=options.model, prompt=prompt, max_tokens=LENGTH, stream=True
            )
            return "".join([choice.text async for chunk in chunks for choice in chunk.choices])

        asks = dict(zip(WAYS, (alone, whole, streamed), strict=True))
        known: list[str] | None = None
        for users in options.in_flight:
            for repetition in range(options.repeat):
                # Each in turn begins, so that no way always comes after the same one.
                first = repetition % len(WAYS)
                for way in WAYS[first:] + WAYS[:first]:
                    await timed(asks[way], prompts[: max(4, users)], users)  # warm; not counted
                    seconds, texts = await timed(asks[way], prompts, users)
                    known = known or texts
                    if texts != known:
                        raise RuntimeError(f"{way} with {users} in flight gave other answers")
                    tokens = sum(map(len, tokenizer(texts)["input_ids"]))
                    speeds[way].setdefault(users, []).append(tokens / seconds)
            print(described(speeds, users), flush=True)
    return speeds


def described(speeds: dict[str, dict[int, list[float]]], users: int) -> str:
    """A line: the engine's speed, and the share of it that is left to each other way."""
    import numpy as np
    from scipy import stats

    engine = np.array(speeds["engine"][users])
    parts = [f"{users:>3} in flight: engine {engine.mean():8,.0f} tokens/s"]
    for way in WAYS[1:]:
        shares = np.array(speeds[way][users]) / engine
        low, high = stats.t.interval(
            0.95, len(shares) - 1, shares.mean(), shares.std(ddof=1) / len(shares) ** 0.5
        )
        parts.append(f"{way} {shares.mean():.1%} ({low:.1%} to {high:.1%})")
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    given = parser(__doc__)
    given.add_argument("--model", default="tiny-d2f")
    given.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    given.add_argument("--problems", type=int, default=96, help="a run")
    given.add_argument("--repeat", type=int, default=6, help="at least 2")
    given.add_argument("--threads", type=int, default=1, help="of a forward")
    given.add_argument("--json", type=Path, default=Path("benchmarks/results/serve/cost.json"))
    options = given.parse_args(arguments)
    limits = ("--max-batch", str(BATCH))
    with serving([options.model], *limits, threads=options.threads) as (url, _):
        speeds = asyncio.run(measure(url, options))
    report = {key: getattr(options, key) for key in ("model", "threads", "problems")}
    report["tokens_per_second"] = speeds
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
