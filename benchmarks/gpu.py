"""What a GPU does: copies out of the data plane's memory, and steps in which an engine and a training rank share it.

    python benchmarks/gpu.py [--json]                     # both, with a random Qwen2.5-VL of 1.9 billion weights
    python benchmarks/gpu.py --only copies
    python benchmarks/gpu.py --only steps --layers 36 --hidden 2048 --steps 5 train.recompute=none
    python benchmarks/gpu.py --only steps --layers 2 --hidden 128 --dtype float32      # tries the script on a CPU

`copies` brings 64 objects of 16 MiB to the GPU: from views as they are, from views whose memory is registered
(`pin_for_cuda`), from page-locked tensors, and by way of one. `steps` trains on scans that are enlarged to 448 x 448,
32 prompts of 8 responses of 128 tokens, with rewards at random; other arguments override keys of its config. Its rows
are the steps from the second on, in which nothing is compiled or page-locked for the first time; bytes are what NVML
reports for the GPU (on a CPU what the processes hold).
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.common.runs import parser, run_and_read, show

OBJECT_BYTES, NUM_OBJECTS, REPEATS = 16 << 20, 64, 7
SIDE = 448
FIELDS = {
    "rollout s": "time/rollout_s",
    "update s": "time/update_s",
    "release s": "train/release_s",
    "restore s": "train/restore_s",
    "publish s": "time/publish_s",
    "step s": "time/step_s",
    "tokens": "rollout/num_tokens",
    "rollout GB": "placement/rollout_awake_bytes_max",
    "training GB": "placement/train_awake_bytes_max",
    "both asleep GB": "placement/rollout_asleep_bytes_max",
    "engine from trainer": "rollout/logprob_diff_mean",
}
"""By column the metric."""


def coin(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Return a reward at random, so that an untrained model has something to learn."""
    return float(random.random() < 0.5)


def copies() -> list[dict[str, Any]]:
    """Return GB/s of each way from the data plane to the GPU: median, lowest and highest."""
    import numpy as np
    import torch

    from dataplane.client.client import Client
    from dataplane.client.embedded import EmbeddedNode
    from dataplane.client.reader import Reader
    from dataplane.client.torch_view import as_tensor, pin_for_cuda

    def row(way: str, copy: Callable[[], object]) -> dict[str, Any]:
        rates = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            rates.append(OBJECT_BYTES * NUM_OBJECTS / (time.perf_counter() - started) / 1e9)
        return {"copied from": way, "GB/s": statistics.median(rates), "lowest": min(rates), "highest": max(rates)}

    memory = 3 * OBJECT_BYTES * NUM_OBJECTS
    with EmbeddedNode(memory_bytes=memory, roots={}) as node, Client(node.uri) as client, Reader(node.uri) as reader:
        draw = np.random.default_rng(0)
        data = (draw.integers(0, 256, OBJECT_BYTES, np.uint8) for _ in range(NUM_OBJECTS))
        refs = [client.put(array, name=f"object {number}") for number, array in enumerate(data)]
        views = [as_tensor(view) for view in reader.resolve(refs)]
        there = [torch.empty(OBJECT_BYTES, dtype=torch.uint8, device="cuda") for _ in views]

        def straight(sources: Sequence[torch.Tensor]) -> None:
            for target, source in zip(there, sources, strict=True):
                target.copy_(source, non_blocking=True)

        def by_way(between: Sequence[torch.Tensor]) -> None:
            for target, pinned, view in zip(there, between, views, strict=True):
                target.copy_(pinned.copy_(view), non_blocking=True)

        rows = [row("views", lambda: straight(views))]
        with pin_for_cuda(reader):
            rows.append(row("registered views", lambda: straight(views)))
            assert all(torch.equal(target.cpu(), view) for target, view in zip(there, views, strict=True))
            locked = [torch.empty_like(view, pin_memory=True).copy_(view) for view in views]
            rows.append(row("page-locked tensors", lambda: straight(locked)))
            rows.append(row("views, by way of a page-locked tensor", lambda: by_way(locked)))
        views.clear()
    return rows


def steps(*, num_layers: int, hidden: int, dtype: str, num_steps: int, overrides: list[str]) -> list[dict[str, Any]]:
    """Return a row for each step but the first."""
    from examples.digits.data import Split, make_split, write_shards

    with tempfile.TemporaryDirectory(prefix="yatt-gpu-") as name:
        folder = Path(name)
        build_model(folder / "model", num_layers=num_layers, hidden=hidden, dtype=dtype)
        split = make_split(seed=0)
        write_shards(folder, Split(train=split.train[:400], held_out=split.held_out[:32]))
        settings = [
            f"model={json.dumps({'path': str(folder / 'model'), 'dtype': dtype})}",
            f"data.train={folder}/train-*.tar",
            f"data.eval={folder}/eval-*.tar",
            f"run.dir={folder}/runs",
            f"reward.function={Path(__file__).resolve()}:coin",
            f"train.steps={num_steps}",
            *("placement.num_devices=1", "rollout.num_engines=1", "eval.every=0", "checkpoint.every=0"),
            *("rollout.max_tokens=128", "rollout.max_model_len=1024", "rollout.kv_cache_memory=8GiB"),
            *("train.prompts_per_step=32", "train.num_minibatches=1", "train.max_tokens_per_microbatch=8192"),
            *("train.recompute=full", "dataplane.memory=2GiB"),
        ]
        records = run_and_read("configs/digits_cpu.yaml", [*settings, *overrides])
    return [_row(record) for record in records if record["step"] > 1]


def build_model(folder: Path, *, num_layers: int, hidden: int, dtype: str) -> None:
    """Write a random Qwen2.5-VL with the tokenizer of the digits example, which enlarges its images to SIDE x SIDE. A
    head has 128 values, or a quarter of a narrow model; 151,936 tokens, of which the tokenizer knows a few."""
    import torch
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    from examples.digits.model import build_model_folder

    build_model_folder(folder)
    config = AutoConfig.from_pretrained(folder)
    text, vision = config.text_config, config.vision_config
    head = min(128, hidden // 4)
    text.update({"hidden_size": hidden, "intermediate_size": 6 * hidden, "num_hidden_layers": num_layers})
    text.update({"num_attention_heads": hidden // head, "num_key_value_heads": 2, "vocab_size": 151936})
    text.update({"layer_types": ["full_attention"] * num_layers, "initializer_range": 0.02})
    text.rope_parameters["mrope_section"] = [head // 8, 3 * head // 16, 3 * head // 16]
    depth = max(2, num_layers // 2)
    vision.update({"depth": depth, "hidden_size": 80 * 16, "num_heads": 16, "intermediate_size": 3420})
    vision.update({"fullatt_block_indexes": [depth // 2, depth - 1], "out_hidden_size": hidden})
    config.tie_word_embeddings = text.tie_word_embeddings = True
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    for file in folder.glob("*processor_config.json"):
        whole = json.loads(file.read_text())
        of_images = whole.get("image_processor", whole)
        if "size" in of_images:
            of_images["size"] = {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}
        file.write_text(json.dumps(whole))


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    row = {"step": record["step"]}
    for column, name in FIELDS.items():
        row[column] = record[name] / 1e9 if column.endswith("GB") else record[name]
    return row


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> None:
    """Measure, and print a table for each part."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", choices=("copies", "steps"), help="one of the two parts")
    arguments.add_argument("--layers", type=int, default=28, help="layers of the decoder (%(default)s)")
    arguments.add_argument("--hidden", type=int, default=1536, help="its hidden size (%(default)s)")
    arguments.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments.add_argument("--steps", type=int, default=4, help="training steps (%(default)s)")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    given = arguments.parse_intermixed_args()
    if given.only != "steps" and not _has_gpu():
        arguments.error("there is no CUDA device for the copies; --only steps runs without one")
    if given.only != "steps":
        show("1 GiB from the data plane to the GPU", copies(), as_json=given.json)
    if given.only != "copies":
        rows = steps(
            num_layers=given.layers,
            hidden=given.hidden,
            dtype=given.dtype,
            num_steps=given.steps,
            overrides=given.overrides,
        )
        show(f"{given.layers} layers of {given.hidden}, {given.dtype}", rows, as_json=given.json)


if __name__ == "__main__":
    main()
