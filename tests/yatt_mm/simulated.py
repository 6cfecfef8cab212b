"""Makes the configs of small simulations for tests."""

from __future__ import annotations

from typing import Any

from benchmarks.moving_split import after_generation
from yatt_mm.simulator.config import SimulationConfig, parse_simulation


def tree(**changes: Any) -> dict[str, Any]:
    """Return a config with two cells of one device. Every cost is zero unless `changes` (dotted keys, with `__` for the
    dot) set it."""
    base: dict[str, Any] = {
        "run": {"steps": 1},
        "devices": {"num": 2, "per_cell": 1},
        "workload": {
            "prompts_per_step": 3,
            "group_size": 1,
            "prompt_tokens": 0,
            "judge_prompt_tokens": 0,
            "response": {"median": 10, "sigma": 0, "max_tokens": 10000},
            "verdict": {"median": 4, "sigma": 0, "max_tokens": 10000},
        },
        "rollout": engine(decode_fixed_s=1.0),
        "genrm": engine(decode_fixed_s=1.0),
        **after_generation(),
    }
    return override(base, **changes)


def override(base: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the tree, changed in place at these keys (`__` stands for the dot)."""
    for key, value in changes.items():
        *sections, leaf = key.split("__")
        place = base
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return base


def engine(**changes: Any) -> dict[str, Any]:
    """Return an engine of one device that works on one sequence at a time and costs nothing."""
    return {
        "devices": 1,
        "decode_fixed_s": 0.0,
        "decode_per_sequence_s": 0.0,
        "prefill_per_token_s": 0.0,
        "max_num_seqs": 1,
        "kv_tokens": 1e9,
        "sleep_s": 0.0,
        "wake_s": 0.0,
        **changes,
    }


def simulation(**changes: Any) -> SimulationConfig:
    """Return the checked config that `tree(**changes)` describes."""
    return parse_simulation(tree(**changes))
