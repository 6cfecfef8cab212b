"""Formats the results of the layouts: a table for people, an object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from yatt_mm.simulator.config import NO_SOURCE, SimulationConfig
from yatt_mm.simulator.results import LayoutResult


def as_object(results: Sequence[LayoutResult]) -> dict[str, Any]:
    """Return the object that `--json` prints."""
    return {
        "layouts": [
            {
                "name": result.name,
                "step_s": result.step_s,
                "rollout_s": result.rollout_s,
                "busy_frac": result.busy_frac,
                "split": result.split,
                "num_moves": result.num_moves,
                "steps_s": [step.step_s for step in result.steps],
                "train_s": [step.train_s for step in result.steps],
                "num_prompts_used": [step.num_prompts_used for step in result.steps],
            }
            for result in results
        ]
    }


def as_table(results: Sequence[LayoutResult], title: str) -> Table:
    """Return a table with one row per layout. Savings say by how much full colocation and the dynamic split shorten the
    time of the row's layout."""
    table = Table(title=title)
    table.add_column("layout", no_wrap=True, min_width=max(len(result.name) for result in results))
    for heading in ("step_s", "rollout_s", "busy_frac", "full saves", "dynamic saves", "dynamic saves (rollout)"):
        table.add_column(heading, justify="right")
    table.add_column("devices")
    by_name = {result.name: result for result in results}
    full, dynamic = by_name.get("full"), by_name.get("partial_dynamic")
    for result in results:
        table.add_row(
            result.name,
            f"{result.step_s:.1f}",
            f"{result.rollout_s:.1f}",
            f"{result.busy_frac:.3f}",
            _saving(full.step_s if full else None, result.step_s),
            _saving(dynamic.step_s if dynamic else None, result.step_s),
            _saving(dynamic.rollout_s if dynamic else None, result.rollout_s),
            result.split,
        )
    return table


def conclusion(results: Sequence[LayoutResult]) -> str:
    """Return in a sentence which layout has the shortest steps."""
    ranked = sorted((result for result in results if result.name != "async"), key=lambda result: result.step_s)
    best, *others = ranked
    text = f"{best.name} has the shortest steps of the layouts that train on responses of the present policy: "
    text += f"{best.step_s:.1f} s"
    if others:
        text += f", {_saving(best.step_s, others[0].step_s).lstrip('+')} less than {others[0].name}"
    behind = next((result for result in results if result.name == "async"), None)
    if behind is not None and behind.step_s < best.step_s:
        text += f"; async takes {behind.step_s:.1f} s, on responses of an older policy"
    return text


def assumed_keys(config: SimulationConfig) -> list[str]:
    """Return the keys whose source says that they are assumed, or that have no source."""
    return [
        key
        for key, source in _sources(config.model_dump())
        if source.lower().startswith("assumed") or source == NO_SOURCE
    ]


def _saving(new_s: float | None, old_s: float) -> str:
    """Return the saving, or an empty text if there is nothing to compare: an asynchronous batch may be ready as soon as
    it is asked for."""
    return "" if new_s is None or old_s == 0 else f"{1 - new_s / old_s:+.1%}"


def _sources(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in tree.items():
        if isinstance(value, dict):
            if set(value) == {"value", "source"}:
                found.append((f"{prefix}{key}", value["source"]))
            else:
                found += _sources(value, f"{prefix}{key}.")
    return found
