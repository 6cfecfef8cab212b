"""Peak memory and time of log-probabilities and their gradients: ours in chunks, next to the naive way.

    python benchmarks/loss_memory.py
    python benchmarks/loss_memory.py --tokens 4096 --vocab 151936 --hidden 2048 --dtype bfloat16 --json
    python benchmarks/loss_memory.py --entropy           # the entropies have a weight in the loss

Both paths get the same hidden states [tokens, hidden] and head [vocab, hidden], compute the label's log-probability and
the entropy of every token, a weighted sum of them, and the gradients of both inputs. `naive` writes that down with
log_softmax over all logits. Each path runs in a process of its own: `peak_bytes` is what it takes beyond its inputs in
its first run, gradients included, `seconds` the median of the runs after it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

PATHS = ("ours", "naive")


def main() -> None:
    """Measure the memory of both ways to compute the loss, and print the table. With --json, print one more line for
    programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="scored tokens of a microbatch (2048)")
    parser.add_argument("--vocab", type=int, default=65536, help="rows of the head (65536)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (512)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of both inputs (float32)")
    parser.add_argument("--entropy", action="store_true", help="give the entropies a weight in the loss")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs (3)")
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    options = parser.parse_args()
    console = Console(stderr=options.json)
    rows = []
    for path in PATHS:
        with console.status(f"measuring {path}"), multiprocessing.get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (path, options)))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table(*rows[0], title=f"loss of {options.tokens} tokens; load average {load}")
    for row in rows:
        table.add_row(row["path"], f"{row['peak_bytes'] / 2**20:,.0f} MiB", f"{row['seconds']:.2f}")
    console.print(table)
    if options.json:
        print(json.dumps({"rows": rows}))


def measure(path: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return one row of the table: the peak memory and the time of the loss on this path. Runs in a process of its
    own."""
    import torch
    import torch.distributed as dist

    from benchmarks.common.peaks import measured_peak
    from models.decoder.logprob import Head, linear_logprob

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype, device=device).requires_grad_()
    weight = (torch.randn(options.vocab, options.hidden, device=device) / 16).to(dtype).requires_grad_()
    labels = torch.randint(0, options.vocab, (options.tokens,), device=device)
    loss_weight = torch.rand(options.tokens, device=device)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    head = Head(group=dist.group.WORLD, vocab_size=options.vocab)

    def run() -> None:
        if path == "ours":
            logprobs, entropy = linear_logprob(hidden, weight, labels, head)
        else:
            distribution = (hidden @ weight.t()).float().log_softmax(-1)
            logprobs = distribution.gather(1, labels[:, None]).squeeze(1)
            entropy = -(distribution.exp() * distribution).sum(-1)
            if not options.entropy:
                entropy = entropy.detach()
        entropy_coef = 0.01 if options.entropy else 0.0
        torch.autograd.grad((loss_weight * (logprobs + entropy_coef * entropy)).sum(), (hidden, weight))
        if device.type == "cuda":
            torch.cuda.synchronize()

    with measured_peak() as peak:
        run()
    times = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    dist.destroy_process_group()
    return {"path": path, "peak_bytes": peak.num_bytes, "seconds": statistics.median(times)}


if __name__ == "__main__":
    main()
