"""python -m benchmarks.serve_cost --model tiny-d2f

What the server costs: visible tokens a second through HTTP, whole answers and streamed ones,
against `decode.AsyncEngine` alone, with 1, 8 and 32 requests in flight. The same prompts and
decoder, the same threads of a forward; the server and the engine are processes of their own, warm,
and take turns in each repetition. The answers must be the same to the letter. Printed is the mean
share of the engine's speed that is left, with its 95 % interval (Student's t over the repetitions'
ratios).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d2f.errors import InputError
from d2f.files import make_folder, write_beside

if TYPE_CHECKING:
    from decode.compare.client import Client
    from decode.decoders import Decoder
    from decode.engine.async_engine import AsyncEngine

OUTPUT = Path("benchmarks/results/serve/cost.json")
WAYS = ("engine", "whole", "streamed")
BATCH = 32
LENGTH = 64  # most new tokens
SERVED = "http"  # the entry's name in errors


async def alone(
    engine: AsyncEngine, prompts: Sequence[list[int]], decoder: Decoder, users: int
) -> tuple[float, list[str]]:
    """Seconds and answers of the engine with `users` requests in flight."""
    texts = [""] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def user() -> None:
        for number, prompt in waiting:
            async for event in engine.generate(prompt, decoder):
                if event.result is not None:
                    texts[number] = event.result.text or ""

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    return time.perf_counter() - began, texts


def served(client: Client, prompts: Sequence[list[int]], users: int) -> tuple[float, list[str]]:
    """The same through HTTP. Raises InputError where a request fails."""
    run = client.run(prompts, users, max_new_tokens=LENGTH, stop=())
    bad = next((answer.error for answer in run.answers if answer.error is not None), None)
    if bad is not None:
        raise InputError(f"a request failed: {bad}")
    return run.seconds, [answer.text for answer in run.answers]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of each way, in flight and repetition, and the shares that are left."""
    import torch

    import d2f
    import decode
    from benchmarks.our_server import our_server
    from d2f.tasks import make_problems
    from decode.compare.client import Client
    from decode.compare.config import Endpoint, Limits
    from decode.decoders import default_decoder, qualified_name
    from decode.engine.prompts import encode
    from decode.report import environment

    torch.set_num_threads(options.threads)
    model = d2f.load(options.model)
    model.merge_adapter()
    kind = default_decoder(model.contract)
    decoder: Any = kind(**kind.with_model_defaults({"max_new_tokens": LENGTH}, model.contract))
    problems = make_problems("story", "heldout", options.problems, seed=0)
    prompts = [encode(model, problem.question, "a problem") for problem in problems]
    found: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        limits = ("--max-batch", str(BATCH))
        server = stack.enter_context(
            our_server([options.model], folder / "log", *limits, threads=options.threads)
        )
        url = f"http://127.0.0.1:{server.port}/v1"
        clients = {
            way: Client(
                Endpoint(
                    name=SERVED, kind="endpoint", url=url, model=options.model,
                    tokenizer=options.model, stream=way == "streamed",
                    body={"decoder": qualified_name(kind)},
                ),
                url, options.model, Limits(), retries=0,
            )
            for way in WAYS[1:]
        }  # fmt: skip
        runner = stack.enter_context(asyncio.Runner())

        async def start() -> AsyncEngine:
            return decode.AsyncEngine(model, batch_size=BATCH)

        engine = runner.run(start())
        stack.callback(lambda: runner.run(engine.close()))

        def run(way: str, few: Sequence[list[int]], users: int) -> tuple[float, list[str]]:
            if way == "engine":
                return runner.run(alone(engine, few, decoder, users))
            return served(clients[way], few, users)

        expected: list[str] | None = None
        for users in options.in_flight:
            for repetition in range(options.repeat):
                # Each in turn begins, so that no way always comes after the same one.
                order = WAYS[repetition % len(WAYS) :] + WAYS[: repetition % len(WAYS)]
                for way in order:
                    run(way, prompts[: max(4, users)], users)  # warm; not counted
                    seconds, texts = run(way, prompts, users)
                    expected = expected or texts
                    if texts != expected:
                        raise InputError(f"{way} with {users} in flight gave other answers")
                    tokens = sum(map(len, model.tokenizer(texts)["input_ids"]))  # type: ignore[misc]
                    found.setdefault((way, users), []).append(tokens / seconds)
            print(_line(users, found), flush=True)
    return {
        **environment(model),
        "model": options.model,
        "decoder": repr(decoder),
        "requests": len(prompts),
        "repetitions": options.repeat,
        "counted": "visible tokens of all answers over the time from the first request to the end "
        "of the last; share: a repetition's speed over that of the engine in the same repetition",
        "measured": [
            {
                "way": way,
                "in_flight": users,
                "tokens_per_second": speeds,
                **_share(found, way, users),
            }
            for (way, users), speeds in found.items()
        ],
    }


def _share(found: dict[tuple[str, int], list[float]], way: str, users: int) -> dict[str, Any]:
    """The share of the engine's speed, with its interval."""
    from decode.report import mean_interval

    pairs = zip(found[way, users], found["engine", users], strict=True)
    mean, low, high = mean_interval([one / other for one, other in pairs])
    return {} if way == "engine" else {"share": mean, "low": low, "high": high}


def _line(users: int, found: dict[tuple[str, int], list[float]]) -> str:
    speeds = found["engine", users]
    parts = [f"{users:>3} in flight: engine {sum(speeds) / len(speeds):8,.0f} tokens/s"]
    for way in WAYS[1:]:
        share = _share(found, way, users)
        parts.append(f"{way} {share['share']:.1%} ({share['low']:.1%} to {share['high']:.1%})")
    return ", ".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="tiny-d2f", help="default tiny-d2f")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--problems", type=int, default=96, help="a run (default 96)")
    parser.add_argument("--repeat", type=int, default=6, help="at least 2 (default 6)")
    parser.add_argument("--threads", type=int, default=1, help="of a forward (default 1)")
    parser.add_argument("--json", type=Path, default=OUTPUT, help=f"report (default {OUTPUT})")
    options = parser.parse_args(arguments)
    try:
        if min(options.problems, options.threads, *options.in_flight, options.repeat - 1) < 1:
            raise InputError(
                "expected at least 1 of --problems, --threads and --in-flight, 2 of --repeat"
            )
        make_folder(options.json.parent)
        report = measure(options)
        write_beside(options.json, json.dumps(report, indent=1) + "\n")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
