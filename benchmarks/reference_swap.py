"""How long the weights of a reference take to come in the place of the policy's and to go, and what memory that takes.

    python -m benchmarks.reference_swap                    # one rank, 100M parameters, float32 and bfloat16
    python -m benchmarks.reference_swap --params 10 --json # a small model, with a line for programs

One training rank sleeps and wakes once before, as it does in every step of full colocation, so its weights have a place
in host memory. `memcpy` copies one flat tensor of as many bytes into memory that was written before. `grown` is the
highest memory during the swaps, beyond that before, in sizes of the weights: a second model would be 1. It is that of
the CUDA device, or on the CPU the anonymous memory of the process, which leaves out the files that are read.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import models  # installs the import hooks that CPU builds of torch need
from benchmarks.common.runs import parser, show

__all__ = ["models"]


def main() -> None:
    """Parse the arguments, measure, and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--params", type=float, default=100.0, help="millions of parameters, about (%(default)s)")
    arguments.add_argument("--rounds", type=int, default=9, help="how often it is measured (%(default)s)")
    options = arguments.parse_args()
    from benchmarks.publish import build_folder
    from yatt_mm.training.distributed import init_distributed

    with tempfile.TemporaryDirectory() as folder:
        init_distributed(rank=0, world_size=1, store=f"file://{folder}/store", timeout_s=300)
        model_dir = build_folder(Path(folder) / "model", int(options.params * 1e6))
        rows = [measure(model_dir, dtype, options.rounds) for dtype in ("float32", "bfloat16")]
    show("A reference in the place of the policy", rows, as_json=options.json)


def measure(model_dir: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Return one row: medians and ranges over the rounds."""
    import torch

    from benchmarks.common.peaks import measured_peak
    from models.layout.parallel import Parallel
    from models.weights.checkpoint_files import CheckpointFiles
    from yatt_mm.protocol.adam_settings import AdamSettings
    from yatt_mm.training.megatron_engine import TrainEngine
    from yatt_mm.training.offload import EVERYTHING

    optim = AdamSettings(lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95), clip_grad=0.0)
    engine = TrainEngine(model_dir=model_dir, parallel=Parallel(), optim=optim, dtype=dtype, seed=0)
    num_bytes = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in engine.weights.metadata())
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    engine.memory.hold(())
    engine.memory.hold(EVERYTHING)
    swaps, copies = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        target.copy_(source)
        between = time.perf_counter()
        with engine.weights_of(CheckpointFiles(model_dir)):
            pass
        swaps.append(time.perf_counter() - between)
        copies.append(between - started)
    before = _anonymous_bytes()
    with _Highest() as highest, measured_peak() as of_device:
        for _ in range(rounds):
            with engine.weights_of(CheckpointFiles(model_dir)):
                pass
    return {
        "dtype": dtype,
        "MB": num_bytes / 1e6,
        "swap s": statistics.median(swaps),
        "from": min(swaps),
        "to": max(swaps),
        "of memcpy": statistics.median(swap / copy for swap, copy in zip(swaps, copies)),
        "grown": (of_device.num_bytes if torch.cuda.is_available() else highest.nbytes - before) / num_bytes,
    }


class _Highest(threading.Thread):
    """Looks for the highest anonymous memory of this process in a `with` block."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.nbytes = 0
        self._is_over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def run(self) -> None:
        while not self._is_over.wait(0.001):
            self.nbytes = max(self.nbytes, _anonymous_bytes())


def _anonymous_bytes() -> int:
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
