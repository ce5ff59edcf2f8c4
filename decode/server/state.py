"""Keep what the routes of one application share: models, limits, and counts for Prometheus.

docs/serving.md says what each count means.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from d2f.errors import not_one_of
from decode.server.generation import Generation
from decode.server.models import ServedModel
from decode.server.options import Options
from decode.server.protocol import ApiError

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_GAPS = (0.001, 0.0025, *_SECONDS[:11])
_RATES = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32)
_WHOSE = ("model", "decoder")


class Metrics:
    """Count what one application does, in a registry of its own."""

    def __init__(self, models: Mapping[str, ServedModel]):
        self.registry = registry = CollectorRegistry()
        registry.register(_Engines(models))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"d2f_{name}", text, labels or _WHOSE, registry=registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"d2f_{name}", text, _WHOSE, buckets=[*buckets], registry=registry)

        self.responses = counter("http_responses", "Answers by route.", "route", "status")
        self._requests = counter("requests", "Requests for text by outcome.", *_WHOSE, "outcome")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self._tokens = counter("tokens", "Visible tokens of responses.")
        self._forwards = counter(
            "request_forwards", "Forwards of requests, a shared one counted for each."
        )
        self._rows = counter("request_rows", "Rows fed for requests.")
        self._rate = histogram("tokens_per_forward", "Tokens a forward of a response.", _RATES)
        self._whole = histogram("request_seconds", "Seconds from arrival to the end.", _SECONDS)
        self._first = histogram(
            "time_to_first_token_seconds", "Seconds from arrival to the first token.", _SECONDS
        )
        self._gap = histogram("inter_token_seconds", "Seconds between settling tokens.", _GAPS)

    def ended(self, generation: Generation) -> None:
        """Count a request for text that has ended, however it did."""
        whose = generation.served.name, generation.decoder.name
        self._requests.labels(*whose, generation.outcome).inc()
        if generation.outcome == "refused":
            return
        calls = generation.calls
        self._prompt_tokens.labels(*whose).inc(generation.prompt_tokens)
        self._whole.labels(*whose).observe(generation.seconds)
        self._forwards.labels(*whose).inc(len(calls))
        self._rows.labels(*whose).inc(sum(fed for fed, _ in calls))
        self._tokens.labels(*whose).inc(generation.tokens)
        for choice in generation.choices:
            if choice.result is not None and choice.calls:
                self._rate.labels(*whose).observe(choice.tokens / len(choice.calls))
            for first in choice.grew[:1]:
                self._first.labels(*whose).observe(first - generation.began)
            for one, next in pairwise(choice.grew):
                self._gap.labels(*whose).observe(next - one)


class _Engines(Collector):
    """Read the counts of the engines when they are asked for."""

    _counts: ClassVar[dict[str, tuple[type[GaugeMetricFamily | CounterMetricFamily], str]]] = {
        "running": (GaugeMetricFamily, "Choices in the batch."),
        "waiting": (GaugeMetricFamily, "Choices that wait for room."),
        "slots": (GaugeMetricFamily, "Positions of the cache."),
        "slots_used": (GaugeMetricFamily, "Positions that hold a request or a kept prompt."),
        "finished": (CounterMetricFamily, "Choices that came to their end."),
        "cancelled": (CounterMetricFamily, "Choices whose reader left."),
        "failed": (CounterMetricFamily, "Choices that failed."),
        "refused": (CounterMetricFamily, "Choices that found the queue full."),
        "forwards": (CounterMetricFamily, "Calls of the model."),
        "rows": (CounterMetricFamily, "Rows that these fed."),
    }

    def __init__(self, models: Mapping[str, ServedModel]):
        self._models = models

    def collect(self) -> Iterator[Metric]:
        stats = {name: served.engine.stats for name, served in self._models.items()}
        for name, (kind, text) in self._counts.items():
            family = kind(f"d2f_engine_{name}", text, labels=("model",))
            for model, found in stats.items():
                family.add_metric((model,), getattr(found, name))
            yield family


MEGABYTE = 1_000_000
BYTES_A_POSITION = 64  # of a request's JSON: ten digits of an id, or a few escaped characters


@dataclass(eq=False)
class ServerState:
    """Hold the state of one application."""

    models: Mapping[str, ServedModel]  # by the names that they are served under
    options: Options
    in_flight: int = 0  # requests that are not answered to their end
    draining: bool = False  # new ones are refused: the server is about to end

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.models)

    def find(self, name: str | None) -> ServedModel:
        """Find the model served under a name; the first one for None. Raises ApiError (404)."""
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(
                404,
                f"there is no such model: {not_one_of(name, self.models)}",
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    @property
    def ready(self) -> bool:
        """Tell whether a request would be taken."""
        return not self.draining and not any(m.engine.closed for m in self.models.values())

    @property
    def most_body(self) -> int:
        """Limit the bytes of a request."""
        return self.options.max_body or max(MEGABYTE, BYTES_A_POSITION * self._longest_context)

    @property
    def most_elements(self) -> int:
        """Limit the elements of a list in a request: ids, messages, prompts (one more prompt than
        there may be has an error of its own)."""
        return max(self._longest_context, self.options.max_choices + 1)

    @property
    def _longest_context(self) -> int:
        return max(served.context_length for served in self.models.values())

    async def cancel(self) -> None:
        """End what runs with an error, and take no more."""
        for served in self.models.values():
            await served.engine.close(finish=False)


def state_of(request: Request) -> ServerState:
    """Return the state of the application that a request came to."""
    state: ServerState = request.app.state.server
    return state
