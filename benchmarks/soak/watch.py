"""What the server says of itself, and what the system says of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

EVERY = 0.25  # seconds between two looks at the memory
PATIENCE = 10.0  # seconds in which what clients left must be gone
GAUGES = ("running", "waiting", "slots_used")


def left_over(metrics: str) -> dict[str, float]:
    """The gauges of requests and slots that are not 0, from the text of /metrics."""
    return {
        f"{sample.name}{dict(sorted(sample.labels.items()))}": sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.endswith(GAUGES) and sample.value
    }


async def leaks(client: httpx.AsyncClient) -> dict[str, float]:
    """What is still held when nobody asks any more, after `PATIENCE` seconds at most."""
    until = time.monotonic() + PATIENCE
    while True:
        response = await client.get("/metrics")
        if response.status_code != 200:  # then nothing is known
            return {f"/metrics answered {response.status_code}": 1.0}
        held = left_over(response.text)
        if not held or time.monotonic() > until:
            return held
        await asyncio.sleep(0.1)


async def memory(pid: int, ended: Callable[[], int], samples: list[tuple[int, int]]) -> None:
    """Add (requests ended, resident bytes of the process) for ever."""
    process = psutil.Process(pid)
    while True:
        samples.append((ended(), process.memory_info().rss))
        await asyncio.sleep(EVERY)
