"""The metrics of a node for prometheus_client, from `stat` and the meter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dataplane.server.meter import BOUNDS_S, Meter

COUNTERS = frozenset(
    {
        "num_evicted",
        "num_hits",
        "num_misses",
        "num_parser_restarts",
        "num_processed",
        "num_recomputed",
        "num_thumbnails",
        "num_fetched",
        "num_fetch_retries",
        "num_prefetched",
        "num_prefetch_hits",
        "num_prefetch_refused",
        "fetched_bytes",
        "fetched_plain_bytes",
        "processed_bytes",
        "pixel_bytes",
        "received_bytes",
        "sent_bytes",
    }
)
"""The numbers of `stat` that only grow. Every other number is a gauge."""


class Metrics:
    """The metrics of one node, in their own `registry`; every value has the node as a label. Thread-safe."""

    def __init__(self, node_id: str, stat: Callable[[], Mapping[str, Any]], meter: Meter) -> None:
        self._node_id = node_id
        self._stat = stat
        self._meter = meter
        self.registry = CollectorRegistry()
        self.registry.register(self)  # type: ignore[arg-type]  # a Collector by its methods

    def describe(self) -> list[Metric]:
        """Return nothing, because the numbers of `stat` are only known when it is called."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number of `stat`, then the counts and times of each verb."""
        stat = self._stat()
        for key, value in stat.items():
            if isinstance(value, (int, float)):
                yield self._number(key, float(value))
        for key, text, label in (
            ("errors", "errors by kind", "kind"),
            ("streams", "open streams by verb", "verb"),
        ):
            kind = CounterMetricFamily if key == "errors" else GaugeMetricFamily
            family = kind(f"dataplane_{key}", text, labels=["node", label])
            for name, count in stat[key].items():
                family.add_metric([self._node_id, name], count)
            yield family
        yield from self._verbs()

    def _number(self, key: str, value: float) -> Metric:
        name = f"dataplane_{key.removeprefix('num_')}"
        kind = CounterMetricFamily if key in COUNTERS else GaugeMetricFamily
        family = kind(name, f"{key} of stat", labels=["node"])
        family.add_metric([self._node_id], value)
        return family

    def _verbs(self) -> Iterator[Metric]:
        latency = HistogramMetricFamily("dataplane_call_seconds", "latency of calls by verb", labels=["node", "verb"])
        errors = CounterMetricFamily("dataplane_call_errors", "failed calls by verb", labels=["node", "verb"])
        for verb, counts in self._meter.verbs().items():
            total, buckets = 0, []
            for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), counts.buckets, strict=True):
                total += count
                buckets.append((bound, total))
            latency.add_metric([self._node_id, verb], buckets, counts.total_s)
            errors.add_metric([self._node_id, verb], counts.num_errors)
        yield latency
        yield errors
