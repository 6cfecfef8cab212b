"""The metrics of a node in two forms: the text for Prometheus, and a page for people. Both come from `stat` and the
meter."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from dataplane.core.units import format_bytes, format_seconds
from dataplane.server.meter import BOUNDS_S, Meter

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = frozenset(
    {
        "num_evicted",
        "num_hits",
        "num_misses",
        "num_processed",
        "num_recomputed",
        "num_fetched",
        "num_fetch_retries",
        "num_prefetched",
        "num_prefetch_hits",
        "num_prefetch_refused",
        "fetched_bytes",
        "processed_bytes",
        "pixel_bytes",
        "received_bytes",
        "sent_bytes",
    }
)
"""The numbers of `stat` that only grow. Every other number is a gauge."""


class Metrics:
    """The metrics of one node, in their own registry. Thread-safe."""

    def __init__(self, node_id: str, stat: Callable[[], Mapping[str, Any]], meter: Meter) -> None:
        self._node_id = node_id
        self._stat = stat
        self._meter = meter
        self._registry = CollectorRegistry()
        self._registry.register(self)  # type: ignore[arg-type]  # a Collector by its methods

    def prometheus(self) -> bytes:
        """Return the text exposition format; every sample has the node as a label."""
        return generate_latest(self._registry)

    def page(self) -> str:
        """Return the same numbers as a page for people."""
        return render_page(self._stat())

    def describe(self) -> list[Metric]:
        """Return nothing, because the numbers of `stat` are only known when it is called."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number of `stat`, then the verbs."""
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


def render_page(stat: Mapping[str, Any]) -> str:
    """Return a node's `stat` as plain text."""
    lines = [f"data-plane node {stat['node']}", ""]
    for key, value in stat.items():
        if isinstance(value, (int, float)):
            lines.append(f"{key:<24} {format_bytes(value) if key.endswith('_bytes') else f'{value:,}':>16}")
    lines += ["", f"{'verb':<16}{'calls':>12}{'errors':>10}{'p50':>12}{'p99':>12}"]
    for verb, counts in stat["verbs"].items():
        times = "".join(f"{format_seconds(counts[key]):>12}" for key in ("p50_s", "p99_s"))
        lines.append(f"{verb:<16}{counts['num_calls']:>12,}{counts['num_errors']:>10,}{times}")
    for title, counts in (("error", stat["errors"]), ("open stream", stat["streams"])):
        if counts:
            lines += ["", f"{title:<28}{'count':>12}"]
            lines += [f"{name:<28}{count:>12,}" for name, count in counts.items()]
    if stat["datasets"]:
        lines += ["", f"{'dataset':<28}{'samples':>12}{'shards':>10}{'bad':>8}"]
        for name, found in stat["datasets"].items():
            lines.append(f"{name:<28}{found['num_samples']:>12,}{found['num_shards']:>10,}{found['num_bad']:>8,}")
    return "\n".join(lines) + "\n"
