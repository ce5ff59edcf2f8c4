"""The counts of several replicas as those of one server, at its /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

ANSWERS = "d2f_http_responses"  # what clients were sent, which the front knows


def together(front: str, replicas: Mapping[str, str]) -> bytes:
    """One text of several in Prometheus' format. replicas: the text of each by its name, which its
    samples get as label ``replica``; of the front's own there are the answers alone."""
    registry = CollectorRegistry()
    registry.register(_Together(front, replicas))
    return generate_latest(registry)


class _Together(Collector):
    def __init__(self, front: str, replicas: Mapping[str, str]):
        self._front = front
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        count = len(self._replicas)
        yield GaugeMetricFamily("d2f_replicas", "Replicas that answered.", value=count)
        yield from (one for one in text_string_to_metric_families(self._front) if _counts(one))
        families: dict[str, Metric] = {}
        for replica, text in self._replicas.items():
            for found in text_string_to_metric_families(text):
                if _counts(found):
                    continue
                family = families.setdefault(
                    found.name, Metric(found.name, found.documentation, found.type)
                )
                for one in found.samples:
                    family.add_sample(one.name, one.labels | {"replica": replica}, one.value)
        yield from families.values()


def _counts(family: Metric) -> bool:
    """Whether it counts answers."""
    return family.name.startswith(ANSWERS)
