"""Training steps of ours next to Hugging Face transformers with AdamW: the same random Qwen2.5-VL, the same samples.

    python benchmarks/train_step.py --model tiny
    python benchmarks/train_step.py --json                # tiny and 100m
    python benchmarks/train_step.py --model 100m --steps 5 --samples 8

A step is forward and backward over samples of mixed lengths (every second one with an image), clipping, and AdamW, on
one rank; in float32 on the CPU, in bfloat16 on a GPU. `ours` packs all samples of a step into one microbatch;
`transformers` takes one sample at a time, so neither computes on padding. The loss is the mean log-probability of the
response's tokens. `tokens_per_s` counts every token, images expanded, by the median step; `peak_bytes` is what the
process takes beyond what it had before the model was loaded; `mfu` is the rate of the model's operations
(`models/flops.py`) as a share of what a large product of two matrices reaches in the same process. Each row comes from
a process of its own.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

PATHS = ("ours", "transformers")
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tiny": (
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
        | {"fullatt_block_indexes": [1]},
    ),
    "100m": (
        {"vocab_size": 32768, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6}
        | {"num_attention_heads": 12, "num_key_value_heads": 4}
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}},
        {"depth": 4, "hidden_size": 384, "intermediate_size": 1024, "num_heads": 6, "out_hidden_size": 768}
        | {"fullatt_block_indexes": [3]},
    ),
}
"""The settings of each model that override the defaults of the text and of the vision config."""
GRIDS = ((1, 16, 16), (1, 12, 20), (1, 24, 16))


def main() -> None:
    """Measure and print the table. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*MODELS, "both"), default="both", help="which model (both)")
    parser.add_argument("--samples", type=int, default=8, help="samples of a step (8)")
    parser.add_argument("--steps", type=int, default=4, help="steps after the first, which is not timed (4)")
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    options = parser.parse_args()
    console = Console(stderr=options.json)
    rows = []
    for model in MODELS if options.model == "both" else (options.model,):
        for path in PATHS:
            with console.status(f"{model}: {path}"), multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append(pool.apply(measure, (model, path, options.samples, options.steps)))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    table = Table("model", "path", "tokens/s", "peak", "utilisation", title=f"one rank; load average {load}")
    for row in rows:
        peak = f"{row['peak_bytes'] / 2**20:,.0f} MiB"
        table.add_row(row["model"], row["path"], f"{row['tokens_per_s']:,.0f}", peak, f"{row['mfu']:.2f}")
    console.print(table)
    if options.json:
        print(json.dumps({"rows": rows}))


def measure(model: str, path: str, num_samples: int, num_steps: int) -> dict[str, Any]:
    """Measure the training step of one model on one path, and return its row of the table. Runs in a process of its
    own."""
    import models.compat.megatron_core  # noqa: F401  makes this process ready for transformers' models
    from benchmarks.common.peaks import measured_peak
    from benchmarks.common.small_model import build_folder
    from models.flops import count_operations
    from models.registry import read_config

    samples = make_samples(num_samples, vocab_size=MODELS[model][0]["vocab_size"])
    with tempfile.TemporaryDirectory() as folder:
        text, vision = MODELS[model]
        model_dir = build_folder(Path(folder) / "model", text=text, vision=vision)
        operations = count_operations(read_config(model_dir))
        times = []
        with measured_peak() as peak:
            step = (_ours if path == "ours" else _transformers)(model_dir, samples)
            for _ in range(num_steps + 1):
                times.append(_seconds(step))
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    num_operations = sum(
        operations.decoder(len(sample.token_ids), int(sample.loss_mask.sum())) + operations.tower(sample.grid_thw)
        for sample in samples
    )
    step_s = statistics.median(times[1:])
    return {
        "model": model,
        "path": path,
        "tokens_per_s": num_tokens / step_s,
        "peak_bytes": peak.num_bytes,
        "mfu": num_operations / step_s / _product_rate(),
    }


def _product_rate() -> float:
    """Return the operations per second of one large product of two matrices."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    size, dtype = (8192, torch.bfloat16) if torch.cuda.is_available() else (1536, torch.float32)
    left, right = torch.ones(2, size, size, dtype=dtype, device=_device())
    _seconds(lambda: left @ right)
    return 2 * size**3 / min(_seconds(lambda: left @ right) for _ in range(5))


def _seconds(work: Callable[[], object]) -> float:
    import torch

    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def make_samples(num_samples: int, *, vocab_size: int) -> list[Any]:
    """Return samples of 60 to 500 tokens; every second one has an image."""
    import numpy as np

    from benchmarks.common.published_lengths import only_weights
    from benchmarks.common.small_model import IMAGE_TOKEN, PATCH_VALUES, VISION_END, VISION_START
    from yatt_mm.training.train_sample import TrainSample

    random = np.random.default_rng(0)
    samples = []
    for number in range(num_samples):
        grids = (GRIDS[number % len(GRIDS)],) if number % 2 else ()
        visual = [VISION_START, *[IMAGE_TOKEN] * (int(np.prod(grids[0])) // 4), VISION_END] if grids else []
        text = random.integers(10, vocab_size, int(random.integers(60, 400))).tolist()
        tokens = np.array([11, *visual, *text], dtype=np.int64)
        mask = np.arange(len(tokens)) >= len(tokens) - len(text) // 2
        patches = tuple(random.integers(0, 256, (int(np.prod(g)), PATCH_VALUES), dtype=np.uint8) for g in grids)
        sampled = only_weights(np.full(int(mask.sum()), 1e-3, dtype=np.float32))
        samples.append(TrainSample(token_ids=tokens, loss_mask=mask, grid_thw=grids, patches=patches, sampled=sampled))
    return samples


def _ours(model_dir: Path, samples: list[Any]) -> Callable[[], object]:
    import torch

    from models.layout.parallel import Parallel
    from yatt_mm.protocol.adam_settings import AdamSettings
    from yatt_mm.training.distributed import init_distributed
    from yatt_mm.training.megatron_engine import TrainEngine

    store = f"file://{model_dir.parent / 'store'}"
    init_distributed(rank=0, world_size=1, store=store, num_threads=os.cpu_count() or 1)
    settings = AdamSettings(lr=1e-5, weight_decay=0.0, betas=(0.9, 0.95), clip_grad=1.0)
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    engine = TrainEngine(model_dir=model_dir, parallel=Parallel(), optim=settings, dtype=dtype, seed=0)

    def loss(logprobs: Any, entropy: Any, inputs: Any) -> tuple[Any, dict[str, Any]]:
        return -(inputs.weights * logprobs).sum(), {}

    return lambda: engine.step([samples], loss)


def _transformers(model_dir: Path, samples: list[Any]) -> Callable[[], object]:
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from benchmarks.common.small_model import IMAGE_TOKEN

    torch.set_num_threads(os.cpu_count() or 1)
    device, dtype = _device(), torch.bfloat16 if torch.cuda.is_available() else torch.float32
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir, dtype=dtype).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        for sample in samples:
            tokens = torch.from_numpy(sample.token_ids)[None].to(device)
            inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE_TOKEN).int()}
            if sample.patches:
                inputs["pixel_values"] = torch.from_numpy(sample.patches[0]).to(device).to(dtype).div_(127.5).sub_(1)
                inputs["image_grid_thw"] = torch.tensor(sample.grid_thw, device=device)
            labels = torch.from_numpy(sample.token_ids[sample.loss_mask]).to(device)
            logits = model(**inputs, use_cache=False, logits_to_keep=len(labels) + 1).logits[0, :-1]
            logprobs = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
            (-(torch.from_numpy(sample.sampled.weights).to(device) * logprobs).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    main()
