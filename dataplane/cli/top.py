"""`python -m dataplane top`: a live picture of a node with its memory, rates, calls and errors.

Rates are differences between two replies to `stat`. The command `stat` uses the tables of this file too.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dataplane.client.client import Client
from dataplane.core.units import format_bytes, format_seconds

RATES = (
    ("hits", "num_hits"),
    ("misses", "num_misses"),
    ("media made", "num_processed"),
    ("made again", "num_recomputed"),
    ("evicted", "num_evicted"),
    ("fetched", "num_fetched"),
    ("received", "received_bytes"),
    ("sent", "sent_bytes"),
)
"""The title and `stat` key of each rate per second."""
BARS = (
    ("memory", "used_bytes", "budget_bytes"),
    ("leased", "leased_bytes", "budget_bytes"),
    ("in scopes", "scoped_bytes", "budget_bytes"),
    ("evictable", "evictable_bytes", "budget_bytes"),
    ("spill", "spilled_bytes", "spill_budget_bytes"),
)
"""The title of each bar, with the `stat` keys of its value and of its maximum."""


def top(client: Client, console: Console, *, interval_s: float, is_once: bool) -> None:
    """Draw a frame every `interval_s` seconds until Ctrl-C; with `is_once` only one.

    Rates are averages since the node's start with `is_once`, and where the console is not a terminal.
    """
    found = client.stat()
    if is_once:
        console.print(frame(client.uri, found, {}, found["uptime_s"]))
        return
    if not console.is_terminal:
        while True:
            console.print(frame(client.uri, found, {}, found["uptime_s"]))
            time.sleep(interval_s)
            found = client.stat()
    with Live(
        frame(client.uri, found, {}, found["uptime_s"]), console=console, screen=True, auto_refresh=False
    ) as live:
        before, then = found, time.monotonic()
        while True:
            time.sleep(interval_s)
            found, now = client.stat(), time.monotonic()
            if found["incarnation"] != before["incarnation"]:
                before = {}  # the node was restarted, and its counters began at 0 again
            live.update(frame(client.uri, found, before, now - then), refresh=True)
            before, then = found, now


def frame(uri: str, found: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> RenderableType:
    """Return one picture of the node: bars, rates, calls by verb, errors, data sets.

    `found` and `before` are replies to `stat`, `seconds` apart; an empty `before` counts as zeros.
    """
    seconds = max(seconds, 1e-3)
    head = Text(f"node {found['node']} at {uri}, up {found['uptime_s']:,.0f} s, ", style="bold")
    head.append(
        f"{found['num_objects']:,} objects, {found['num_leases']:,} leases of {found['num_readers']:,} readers, "
        f"{found['num_scopes']:,} scopes, {found['num_streams']:,} streams"
    )
    parts: list[RenderableType] = [head, _bars(found), _rates(found, before, seconds)]
    parts.append(verbs_table(found["verbs"], before.get("verbs", {}), seconds))
    if found["standing_still"]:
        parts.append(still_table(found["standing_still"]))
    if found["errors"]:
        parts.append(Text("errors: " + ", ".join(f"{kind} {count:,}" for kind, count in found["errors"].items())))
    if found["datasets"]:
        parts.append(datasets_table(found["datasets"]))
    return Group(*parts)


def datasets_table(datasets: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table of the registered data sets and their counts."""
    table = Table("dataset", "samples", "shards", "bad", title="registered datasets")
    for name, counts in datasets.items():
        table.add_row(name, *(f"{counts[key]:,}" for key in ("num_samples", "num_shards", "num_bad")))
    return table


def still_table(clients: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the clients that keep memory while they stand still."""
    table = Table("kind", "pid", "for", "keeps", title="clients that stand still")
    for one in clients:
        seconds, kept = f"{one['still_s']:,.0f} s", format_bytes(one["held_bytes"])
        table.add_row(one["kind"], str(one["pid"]), seconds, kept)
    return table


def _bars(found: Mapping[str, Any]) -> Table:
    """Return the bars of `BARS` whose maximum the node reports."""
    grid = Table.grid(padding=(0, 1))
    for name, used, budget in BARS:
        if found.get(budget):
            bar = ProgressBar(total=found[budget], completed=found[used], width=40)
            grid.add_row(name, bar, f"{format_bytes(found[used])} of {format_bytes(found[budget])}")
    return grid


def _rates(found: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> Table:
    """Return a table of the rates of `RATES` that the node reports."""
    shown = [(name, key) for name, key in RATES if key in found]
    table = Table(*(name for name, _ in shown), title="per second")
    values = ((found[key] - before.get(key, 0)) / seconds for _, key in shown)
    table.add_row(
        *(format_bytes(value) if key.endswith("_bytes") else f"{value:,.1f}" for value, (_, key) in zip(values, shown))
    )
    return table


def verbs_table(verbs: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> Table:
    """Return a table of calls, rates, errors and latencies by verb."""
    table = Table("verb", title="calls")
    for name in ("calls", "per s", "errors", "p50", "p99"):
        table.add_column(name, justify="right")
    for verb, counts in verbs.items():
        rate = (counts["num_calls"] - before.get(verb, {}).get("num_calls", 0)) / seconds
        times = (format_seconds(counts[key]) for key in ("p50_s", "p99_s"))
        table.add_row(verb, f"{counts['num_calls']:,}", f"{rate:,.1f}", f"{counts['num_errors']:,}", *times)
    return table
