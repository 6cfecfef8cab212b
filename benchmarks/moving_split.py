"""Compares the moving split of devices with the best fixed one, found by trying all, on random workloads in the
simulator.

The generation phase of each workload is compared, after the placement policy has seen two steps. `ratio` is the moving
split's time divided by that of the best fixed split; below 1 the moving one is faster.

    python -m benchmarks.moving_split                                  # the 20 workloads that the tests use
    python -m benchmarks.moving_split --kind replacing
    python -m benchmarks.moving_split --kind wide --first 0 --num 240  # other numbers of devices, costs, verdicts
    python -m benchmarks.moving_split --each --json
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.progress import track

from benchmarks.common.runs import parser, show
from yatt_mm.simulator.config import parse_simulation
from yatt_mm.simulator.results import LayoutResult
from yatt_mm.simulator.turn_layouts import partial_dynamic, partial_static

NUM_STEPS_SETTLING = 2
"""The number of first steps that are not counted, because the policy divides devices by what it has measured."""
NEAR = 1.05


def plain(seed: int) -> dict[str, Any]:
    """Return a workload with eight devices and 32 groups of four a step. The rest is random: lengths (some of them very
    long), speeds, how many requests an engine takes, wake costs."""
    draw = random.Random(seed)
    response = {
        "median": draw.uniform(100, 600),
        "sigma": draw.uniform(0.3, 0.7),
        "tail_frac": draw.uniform(0.01, 0.1),
        "tail_alpha": draw.uniform(1.2, 2.5),
        "max_tokens": 4096,
        "prompt_correlation": draw.uniform(0, 0.6),
    }
    verdict = {"median": draw.uniform(30, 300), "sigma": 0.4, "max_tokens": 1024}
    shared = {"devices": 1, "kv_tokens": 1e9, "sleep_s": 0.5}
    rollout = shared | {
        "decode_fixed_s": 0.01,
        "decode_per_sequence_s": draw.uniform(1e-4, 1e-3),
        "prefill_per_token_s": 1e-4,
        "max_num_seqs": draw.choice([16, 64]),
        "wake_s": draw.uniform(0.5, 3),
    }
    genrm = shared | {
        "decode_fixed_s": draw.uniform(0.01, 0.03),
        "decode_per_sequence_s": draw.uniform(1e-4, 1e-3),
        "prefill_per_token_s": 5e-4,
        "max_num_seqs": draw.choice([16, 64]),
        "wake_s": draw.uniform(0.5, 3),
    }
    return {
        "run": {"seed": seed, "steps": 6},
        "devices": {"num": 8, "per_cell": 1},
        "workload": {
            "prompts_per_step": 32,
            "group_size": 4,
            "prompt_tokens": 300,
            "judge_prompt_tokens": 500,
            "response": response,
            "verdict": verdict,
            "signal_frac": 0.7,
        },
        "rollout": rollout,
        "genrm": genrm,
        **after_generation(),
    }


def after_generation() -> dict[str, Any]:
    """Return the sections that a config must have but generation phases do not depend on, with simple numbers."""
    return {
        "training": {
            "flops_per_token": 1,
            "peak_flops": 1,
            "mfu": 1,
            "reference_devices": 1,
            "devices_per_replica": 1,
            "max_tokens_per_microbatch": 100000,
            "sleep_s": 0,
            "wake_s": 0,
        },
        "external": {"paper_genrm_frac": 0.5},
        "publish_s": 0,
    }


def replacing(seed: int) -> dict[str, Any]:
    """Return a workload like `plain`, in which three groups in ten have no signal and are replaced."""
    return plain(seed) | {"sampling": {"replaces_groups": True}}


def wide(seed: int) -> dict[str, Any]:
    """Return a workload with 2 to 16 devices, 16 to 64 groups, 1 to 4 verdicts, and 0 to 12 s to wake. Half of these
    workloads replace groups without signal."""
    draw, tree = random.Random(10_000 + seed), plain(1000 + seed)
    tree["devices"]["num"] = draw.choice([2, 3, 4, 6, 8, 12, 16])
    tree["workload"]["prompts_per_step"] = draw.choice([16, 32, 64])
    tree["workload"]["verdicts_per_response"] = draw.choice([1, 1, 2, 4])
    tree["rollout"]["wake_s"] = draw.uniform(0, 12)
    tree["genrm"]["wake_s"] = draw.uniform(0, 12)
    if draw.random() < 0.5:
        tree["sampling"] = {"replaces_groups": True}
    return tree


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {"plain": plain, "replacing": replacing, "wide": wide}


def settled_s(result: LayoutResult) -> float:
    """Return the mean seconds of a generation phase, without the first steps."""
    return mean(step.rollout_s for step in result.steps[NUM_STEPS_SETTLING:])


def measure(kind: str, seed: int) -> dict[str, Any]:
    """Simulate one workload and return its row."""
    config = parse_simulation(KINDS[kind](seed))
    fixed = [settled_s(partial_static(config, r)) for r in range(1, config.num_cells)]
    moving_s, best_s = settled_s(partial_dynamic(config)), min(fixed)
    return {
        "kind": kind,
        "seed": seed,
        "replaces": config.sampling.replaces_groups,
        "best_split": f"{fixed.index(best_s) + 1}+{config.num_cells - fixed.index(best_s) - 1}",
        "best_s": best_s,
        "moving_s": moving_s,
        "ratio": moving_s / best_s,
    }


def summary(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean, the worst and other figures of the ratios in `rows`, for the set of workloads called `name`."""
    ratios = [row["ratio"] for row in rows]
    return {
        "workloads": name,
        "num": len(ratios),
        "within_5_percent": sum(ratio <= NEAR for ratio in ratios),
        "ahead": sum(ratio < 1 for ratio in ratios),
        "mean_ratio": mean(ratios),
        "worst_ratio": max(ratios),
    }


def main() -> None:
    """Simulate and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--kind", choices=KINDS, default="plain")
    arguments.add_argument("--first", type=int, default=0, metavar="SEED")
    arguments.add_argument("--num", type=int, default=20, metavar="N", help="workloads (default: 20)")
    arguments.add_argument("--each", action="store_true", help="a row for each workload instead of one for all")
    arguments.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="default: one per core")
    options = arguments.parse_args()
    if options.num < 1 or options.first < 0 or options.processes < 1:
        arguments.error("--num and --processes are at least 1, --first at least 0")
    with ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn")) as pool:
        found = pool.map(partial(measure, options.kind), range(options.first, options.first + options.num))
        console = Console(file=sys.stderr)
        rows = list(track(found, total=options.num, console=console, description="simulating", transient=True))
    if not options.each:
        parts = {options.kind: rows}
        if options.kind == "wide":
            parts |= {
                "wide, groups replaced": [row for row in rows if row["replaces"]],
                "wide, none replaced": [row for row in rows if not row["replaces"]],
            }
        rows = [summary(part, name) for name, part in parts.items() if part]
    show("The moving split beside the best fixed one", rows, as_json=options.json)


if __name__ == "__main__":
    main()
