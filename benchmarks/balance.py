"""Measures how evenly work is divided among data-parallel ranks, by the work that the real model does on each rank's
batch.

    python benchmarks/balance.py
    python benchmarks/balance.py --json
    python benchmarks/balance.py --samples 64 --ranks 4 --repeats 1      # a minute

256 samples (32 prompts with one image, 8 responses each) of published sizes (benchmarks/common/published_lengths.py)
are divided among 8 ranks in four ways. `round_robin` deals them out. `token_count` and `verl` use the largest
differencing method on tokens and on verl's 24576 n + n^2 (verl/utils/seqlen_balancing.py); both know samples but no
images. The fourth is `ours`. Everything after that is the same for all: rows of one group on one rank share their
image, under the same caps. One process then trains on each rank's microbatches, one rank after another, forward and
backward, with the real engine.

`max_over_mean` is about the operations that torch's FlopCounterMode counts. `cpu_max_over_mean` is about the processor
time (one thread, the minimum of the repeats, the optimizer included). `wall_max_over_mean` is about the time by the
clock. `operations` are those of all ranks, `slowest` those of the rank that the others wait for.

Token counts are an eighth of the published ones. The model is sized so that attention has the part of the work for
which verl's formula is made (7B), and a visual token costs the tower what it costs at 3B.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.common.published_lengths import Prompt, draw, to_samples
from benchmarks.common.small_model import IMAGE_TOKEN, PATCH_VALUES, build_folder
from benchmarks.common.torch_flops import count
from models.flops import Operations, count_operations
from models.layout.parallel import Parallel
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.training.balance import max_over_mean, spread
from yatt_mm.training.distributed import init_distributed
from yatt_mm.training.largest_differencing import largest_differencing
from yatt_mm.training.megatron_engine import TrainEngine
from yatt_mm.training.microbatches import Limits, Piece, WorkGroup, cut, lay_out, num_microbatches
from yatt_mm.training.train_sample import TrainSample

PATHS = ("round_robin", "token_count", "verl", "ours")
SHRINK = 8
TEXT = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 2336,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
}
VISION = {
    "depth": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 112,
    "fullatt_block_indexes": [3],
}
Ranks = list[list[list[Piece]]]
"""The work of a step: a list of pieces for each [rank][microbatch]."""


def main() -> None:
    """Measure every path and print the table. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=256, help="samples of the batch (256)")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt (8)")
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks (8)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="tokens of a microbatch (1024)")
    parser.add_argument("--repeats", type=int, default=2, help="timed passes; 0 counts operations only (2)")
    parser.add_argument("--seed", type=int, default=0, help="of the sizes that are drawn (0)")
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    options = parser.parse_args()
    console = Console(stderr=options.json)
    with tempfile.TemporaryDirectory(prefix="yatt-bench-") as folder:
        rows = measure(Path(folder), options, console)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(*rows[0], title=f"{options.samples} samples on {options.ranks} ranks; load average {load}")
    for row in rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    if options.json:
        print(json.dumps({"rows": rows}))


def measure(folder: Path, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measure the training step with each way of dividing samples, and return one row of the table for each."""
    model_dir = build_folder(folder / "model", text=TEXT, vision=VISION)
    operations = count_operations(json.loads((model_dir / "config.json").read_text()))
    prompts = draw(options.samples // options.group_size, options.group_size, shrink=SHRINK, seed=options.seed)
    samples = [
        to_samples(prompt, image_token=IMAGE_TOKEN, vocab_size=TEXT["vocab_size"], patch_values=PATCH_VALUES)  # type: ignore[arg-type]
        for prompt in prompts
    ]
    init_distributed(rank=0, world_size=1, store=f"file://{folder / 'store'}")
    optim = AdamSettings(lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95), clip_grad=1.0)
    engine = TrainEngine(model_dir=model_dir, parallel=Parallel(), optim=optim, seed=0)
    engine.step([samples[0]], _loss)  # the first run allocates
    rows = []
    for path in PATHS:
        plan = plan_for(path, prompts, operations, options.ranks, Limits(max_tokens=options.max_tokens))
        with console.status(f"training {path}"):
            rows.append({"path": path} | _run(engine, plan, samples, options.repeats))
    dist.destroy_process_group()
    return rows


def plan_for(path: str, prompts: Sequence[Prompt], operations: Operations, num_ranks: int, limits: Limits) -> Ranks:
    """Return the microbatches of every rank, divided by one of PATHS."""
    groups = [_work_of(position, prompt, operations) for position, prompt in enumerate(prompts)]
    if path == "ours":
        ranks = spread(groups, num_ranks, limits)
    else:
        rows = [(group, row) for group in groups for row in range(len(group.num_tokens))]
        lengths = [group.num_tokens[row] for group, row in rows]
        if path == "round_robin":
            parts = [list(range(rank, len(rows), num_ranks)) for rank in range(num_ranks)]
        else:
            parts = largest_differencing(lengths if path == "token_count" else _verl_costs(lengths), num_ranks)
        ranks = [_pieces([rows[i] for i in part], limits) for part in parts]
    num = num_microbatches(ranks, limits)
    return [lay_out(pieces, num, limits) for pieces in ranks]


def _verl_costs(lengths: Sequence[int]) -> list[int]:
    """Return the cost that verl's formula gives each sample, for the lengths of the published runs."""
    return [24576 * SHRINK * n + (SHRINK * n) ** 2 for n in lengths]


def _work_of(position: int, prompt: Prompt, operations: Operations) -> WorkGroup:
    num_tokens = tuple(prompt.num_prompt + length for length in prompt.lengths)
    return WorkGroup(
        position=position,
        num_tokens=num_tokens,
        num_patches=math.prod(prompt.grid),
        row_costs=tuple(operations.decoder(n, length) for n, length in zip(num_tokens, prompt.lengths)),
        shared_cost=operations.tower([prompt.grid]),
    )


def _pieces(rows: Sequence[tuple[WorkGroup, int]], limits: Limits) -> list[Piece]:
    """Return the pieces of a microbatch: rows of the same group together, as far as a microbatch can hold them."""
    by_group: dict[int, list[tuple[WorkGroup, int]]] = {}
    for group, row in rows:
        by_group.setdefault(group.position, []).append((group, row))
    return [piece for same in by_group.values() for piece in cut(same[0][0], limits, rows=[row for _, row in same])]


def _run(engine: TrainEngine, plan: Ranks, samples: list[list[TrainSample]], repeats: int) -> dict[str, Any]:
    batches = [
        [[samples[piece.group.position][row] for piece in micro for row in piece.rows] for micro in rank]
        for rank in plan
    ]
    counted = [count(lambda batch=batch: engine.step(batch, _loss)) for batch in batches]  # type: ignore[misc]
    planned = [sum(piece.cost for micro in rank for piece in micro) for rank in plan]
    row: dict[str, Any] = {
        "max_over_mean": max_over_mean(counted),
        "operations": sum(counted),
        "slowest": max(counted),
        "num_images": sum(len({piece.group.position for piece in micro}) for rank in plan for micro in rank),
        "num_microbatches": len(plan[0]),
        "counted_over_planned": sum(counted) / sum(planned),
    }
    if repeats:
        passes = [[_clocks(engine, batch) for batch in batches] for _ in range(repeats)]  # a lull helps no single rank
        for place, clock in enumerate(("cpu", "wall")):
            seconds = [min(times[place] for times in of_rank) for of_rank in zip(*passes)]
            row[f"{clock}_max_over_mean"] = max(seconds) * len(seconds) / sum(seconds)
            row[f"{clock}_slowest_s"] = max(seconds)
    return row


def _clocks(engine: TrainEngine, batch: list[list[TrainSample]]) -> tuple[float, float]:
    """Return the seconds of one step: processor time, and time by the clock."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    engine.step(batch, _loss)
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def _loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -(inputs.weights * logprobs).sum(), {}


if __name__ == "__main__":
    main()
