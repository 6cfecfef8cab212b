"""How fast a policy gets out of the trainer into shared memory, next to memcpy of as many bytes in the same run.

python benchmarks/publish.py one rank, a 100M-parameter Qwen2.5-VL, float32 and bfloat16 python benchmarks/publish.py
--tp 2 --json two tensor-parallel ranks; rows for a program python benchmarks/publish.py --params 10 --rounds 3 a small
model, quickly python benchmarks/publish.py --clock processor the processor time of each rank's thread, for a machine
that others use too

`memcpy` copies one flat tensor into memory that was written before. `ours` is `SegmentPublisher.publish`: every tensor
under its Hugging Face name, looked at for nan and infinity, sealed. Both have one thread for each rank, and a round of
one follows a round of the other; the best of all rounds is told. `first` is the publish that makes the segment.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import models  # installs the import hooks that CPU builds of torch need

__all__ = ["models"]

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    path: str
    dtype: str
    ranks: int
    bytes: int
    seconds: float
    """The best of all rounds in seconds; in each round the slowest rank counts."""
    median_s: float
    gb_per_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=100.0, help="millions of parameters, about (default 100)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    parser.add_argument("--rounds", type=int, default=15, help="of each path (default 15)")
    parser.add_argument("--clock", default="wall", choices=["wall", "processor"], help="what counts (default wall)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder, _shared_folder() as segments:
        model_dir = build_folder(Path(folder) / "model", int(args.params * 1e6))
        rows = [
            row
            for dtype in args.dtypes
            for row in measure_in_ranks(
                model_dir, segments, dtype=dtype, num_ranks=args.tp, rounds=args.rounds, clock=args.clock
            )
        ]
    if args.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show(rows)


def build_folder(directory: Path, num_params: int) -> Path:
    """Make a random Qwen2.5-VL of about `num_params` parameters (layers of width 768 are added until there are enough),
    and return its folder."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from tests.yatt_mm.training.tiny import build_folder as build_tiny

    width, vocab_size = 768, 20_000
    per_layer = 4 * width * width // 3 * 2 + 3 * width * 2048
    layers = max(1, (num_params - 2 * vocab_size * width) // per_layer)
    config = Qwen2_5_VLConfig.from_pretrained(build_tiny(directory)).to_dict()
    config["text_config"] |= {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": 2048,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e4},
    }
    config["vision_config"] |= {"out_hidden_size": width}
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).save_pretrained(directory)
    return directory


def measure_in_ranks(
    model_dir: Path, segments: Path, *, dtype: str, num_ranks: int, rounds: int, clock: str
) -> list[Row]:
    """Start the ranks and let them measure. Return the rows, in which the slowest rank of each repetition counts."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.NamedTemporaryFile() as store:
        address = f"file://{store.name}-store"
        job: dict[str, Any] = {"model_dir": model_dir, "segments": segments, "dtype": dtype, "num_ranks": num_ranks}
        job |= {"rounds": rounds, "clock": clock}
        ranks = [context.Process(target=_rank, args=(rank, address, job, answers)) for rank in range(num_ranks)]
        for process in ranks:
            process.start()
        found: list[dict[str, Any]] = [answers.get(timeout=600) for _ in ranks]
        for process in ranks:
            process.join()
    num_bytes = found[0]["bytes"]
    rows = []
    for path in ("memcpy", "ours", "first"):
        slowest = sorted(max(seconds) for seconds in zip(*(answer[path] for answer in found), strict=True))
        best, median = slowest[0], slowest[len(slowest) // 2]
        rows.append(
            Row(
                path=path,
                dtype=dtype,
                ranks=num_ranks,
                bytes=num_bytes,
                seconds=best,
                median_s=median,
                gb_per_s=num_bytes / best / 1e9,
            )
        )
    return rows


def _rank(rank: int, store: str, job: dict[str, Any], answers: Any) -> None:
    """Run a training rank: its share of the memcpy and its part of the publish, alternately."""
    import torch
    import torch.distributed as dist

    from models.layout.parallel import Parallel
    from yatt_mm.protocol.adam_settings import AdamSettings
    from yatt_mm.training.distributed import init_distributed
    from yatt_mm.training.megatron_engine import TrainEngine
    from yatt_mm.weights.segment_publisher import SegmentPublisher

    init_distributed(rank=rank, world_size=job["num_ranks"], store=store, timeout_s=300)
    optim = AdamSettings(lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95), clip_grad=0.0)
    parallel = Parallel(tp=job["num_ranks"])
    engine = TrainEngine(model_dir=job["model_dir"], parallel=parallel, optim=optim, dtype=job["dtype"], seed=0)
    num_bytes = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in engine.weights.metadata())
    source = torch.ones(num_bytes // job["num_ranks"], dtype=torch.uint8)
    target = torch.zeros_like(source)

    now = time.perf_counter if job["clock"] == "wall" else time.thread_time

    def timed(act: Any) -> float:
        dist.barrier()
        started = now()
        act()
        return now() - started

    made: list[SegmentPublisher] = []

    def publish_first() -> None:
        made.append(SegmentPublisher(engine.weights, job["segments"] / job["dtype"]))
        made[0].publish(0)

    answer: dict[str, Any] = {"bytes": num_bytes, "first": [timed(publish_first)], "memcpy": [], "ours": []}
    for version in range(job["rounds"]):
        answer["memcpy"].append(timed(lambda: target.copy_(source)))
        answer["ours"].append(timed(lambda version=version: made[0].publish(version)))
    answers.put(answer)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def _shared_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY, prefix="publish-benchmark-") as folder:
        yield Path(folder)


def show(rows: Sequence[Row]) -> None:
    """Print a table for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table("path", "dtype", "ranks", "MB", "best ms", "median ms", "GB/s", "of memcpy")
    for row in rows:
        memcpy = next(other for other in rows if other.path == "memcpy" and other.dtype == row.dtype)
        table.add_row(
            row.path,
            row.dtype,
            str(row.ranks),
            f"{row.bytes / 1e6:.0f}",
            f"{row.seconds * 1e3:.1f}",
            f"{row.median_s * 1e3:.1f}",
            f"{row.gb_per_s:.2f}",
            f"{memcpy.seconds / row.seconds:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
