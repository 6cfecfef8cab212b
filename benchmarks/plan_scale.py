"""Measures what planning a step costs each controller: the bytes gathered per sample, and the seconds of the plan.

    python benchmarks/plan_scale.py
    python benchmarks/plan_scale.py --samples 65536 --group-size 16 --replicas 256 --json

Every controller gathers all groups of the step (`bytes_per_sample`, pickled as they travel) and plans them for all
replicas; it lays out the microbatches of its own replica. Sizes are those of benchmarks/common/published_lengths.py,
and the model has Qwen2.5-VL-7B's shape. `seconds` is processor time, the minimum of the repeats. There is no torch and
there are no ranks, because a controller has none.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from benchmarks.common.published_lengths import Prompt, draw
from dataplane.core.refs import Lineage, Ref
from models.flops import count_operations
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.training.microbatches import Limits
from yatt_mm.training.step_plan import PlannedGroup, plan_step

MODEL: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def main() -> None:
    """Measure and print the table. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=65536, help="samples of the step (65536)")
    parser.add_argument("--group-size", type=int, nargs="+", default=[1, 8, 16], help="responses per prompt (1 8 16)")
    parser.add_argument("--replicas", type=int, default=256, help="data-parallel replicas (256)")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of a microbatch (16384)")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (3)")
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    options = parser.parse_args()
    rows = [measure(size, options) for size in options.group_size]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(*rows[0], title=f"{options.samples} samples, {options.replicas} replicas; load average {load}")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(stderr=options.json).print(table)
    if options.json:
        print(json.dumps({"rows": rows}))


def measure(group_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure planning with groups of this size, and return one line of the results table."""
    prompts = draw(options.samples // group_size, group_size, shrink=1, seed=0)
    groups = [_planned(position, prompt) for position, prompt in enumerate(prompts)]
    seconds = []
    for _ in range(options.repeats):
        started = time.process_time()
        plan = plan_step(
            groups,
            operations=count_operations(MODEL),
            num_replicas=options.replicas,
            num_minibatches=1,
            limits=Limits(max_tokens=options.max_tokens),
            replicas=[0],
        )
        seconds.append(time.process_time() - started)
    return {
        "group_size": group_size,
        "bytes_per_sample": len(pickle.dumps(groups)) / options.samples,
        "seconds": min(seconds),
        "imbalance": plan.imbalance,
        "num_microbatches": plan.num_microbatches,
    }


def _planned(position: int, prompt: Prompt) -> PlannedGroup:
    """Return a group to plan, with refs like those that the data plane gives."""
    size = len(prompt.lengths)
    num_patches = math.prod(prompt.grid)
    digest = f"{position:032x}"
    lineage = Lineage(
        dataset=f"{1:032x}",
        shard="train-00000.tar",
        offset=position,
        nbytes=200_000,
        source=digest,
        recipe={"version": 1},
    )
    image = Ref(
        name=f"d/{digest}/{1:016x}",
        kind="derived",
        dtype="uint8",
        shape=(num_patches, 1176),
        nbytes=num_patches * 1176,
        node=f"{2:032x}",
        lineage=lineage,
        meta={"grid_thw": list(prompt.grid), "num_tokens": num_patches // 4, "checksum": digest},
    )
    record = Ref(
        name=f"run/rollout/{position}",
        kind="plain",
        dtype="uint8",
        shape=(9000,),
        nbytes=9000,
        node=image.node,
        lineage=None,
    )
    group = GroupRef(
        slot=position,
        ref=record,
        media=(image,),
        num_prompt_tokens=prompt.num_prompt,
        lengths=prompt.lengths,
        policy_versions=((7, 7),) * size,
        finish_reasons=("stop",) * size,
    )
    return PlannedGroup(position=position, group=group, advantages=tuple(0.1 * row for row in range(size)))


if __name__ == "__main__":
    main()
