"""Compares the seven layouts, each with the split that its name promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from yatt_mm.simulator.asynchronous_layout import asynchronous
from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.results import LayoutResult
from yatt_mm.simulator.search import BestFound, find_best
from yatt_mm.simulator.turn_layouts import external, full, partial_dynamic, partial_static

NAMES = (
    "full",
    "partial_static",
    "partial_dynamic",
    "external_genrm_best",
    "external_genrm_equal",
    "external_genrm_paper",
    "async",
)

MIN_ASYNC_CELLS = 3
"""The minimum number of cells for the asynchronous layout, in which rollout, judge and training have separate cells."""


def compare(config: SimulationConfig) -> Iterator[LayoutResult]:
    """Yield the result of every layout for which there are enough cells, in the order of `NAMES`."""
    num_cells = config.num_cells
    yield full(config)
    yield best_partial_static(config)
    yield partial_dynamic(config)
    yield best_external(config)
    yield external(config, num_cells - max(1, num_cells // 2), "external_genrm_equal")
    num_genrm = round(num_cells * config.external.paper_genrm_frac.value)
    yield external(config, num_cells - min(num_cells - 1, max(1, num_genrm)), "external_genrm_paper")
    if num_cells >= MIN_ASYNC_CELLS:
        yield best_async(config)


def best_partial_static(config: SimulationConfig) -> LayoutResult:
    """Return partial colocation with the best split that a search finds."""
    return _searched(config, list(range(1, config.num_cells)), lambda tried, r: partial_static(tried, r))


def best_external(config: SimulationConfig) -> LayoutResult:
    """Return the layout with GenRM on its own devices, with the best split that a search finds."""
    return _searched(
        config, list(range(1, config.num_cells)), lambda tried, r: external(tried, r, "external_genrm_best")
    )


def best_async(config: SimulationConfig) -> LayoutResult:
    """Return the asynchronous layout with the best split into three. The share of cells that generate is found by
    bisection.

    With many cells, those that generate are divided between rollout and GenRM in proportion to the work of each in full
    colocation.
    """
    num_cells = config.num_cells
    every = [(r, g) for r in range(1, num_cells - 1) for g in range(1, num_cells - r)]
    if len(every) > config.search.max_splits:
        rollout_s, genrm_s = full(_shorter(config)).policy_times
        every = []
        for num in range(2, num_cells):
            rollout = min(num - 1, max(1, round(num * rollout_s / (rollout_s + genrm_s))))
            every.append((rollout, num - rollout))
    return _searched(config, every, lambda tried, split: asynchronous(tried, *split))


def _searched(config: SimulationConfig, choices: list, run: Callable[..., LayoutResult]) -> LayoutResult:  # type: ignore[type-arg]
    short = _shorter(config)
    found: BestFound = find_best(  # type: ignore[type-arg]
        choices, lambda choice: run(short, choice), lambda result: result.step_s, max_tries=config.search.max_splits
    )
    result: LayoutResult = found.result if short is config else run(config, found.choice)
    how = f"best of all {found.num_tried}" if found.is_exhaustive else f"best of {found.num_tried} tried"
    return replace(result, split=f"{result.split} ({how})")


def _shorter(config: SimulationConfig) -> SimulationConfig:
    steps = config.search.steps
    if steps is None or steps >= config.run.steps:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})
