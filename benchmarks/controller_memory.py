"""Measures the resident memory of the controllers while gigabytes of pixels pass through a run.

It makes digits as 448x448 JPEGs with grain (so that no two are equal) and trains the example's model on them. The table
shows the growth of the largest controller beside the bytes of patches that the same run made and resolved.

    python -m benchmarks.controller_memory [--json] [--gib 2] [key=value ...]
"""

from __future__ import annotations

import io
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import webdataset
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.common.runs import parser, run_and_read, show

SIDE = 448
PATCH_BYTES = (SIDE // 14) ** 2 * 3 * 2 * 14 * 14
PROMPTS_PER_STEP = 32
EXAMPLE_MODEL = Path("examples/digits/data/model")


def main() -> None:
    """Make the images, run the trainer, and compare the controllers' memory before and after."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--gib", type=float, default=2.0, help="GiB of decoded pixels, as patches")
    arguments.add_argument("overrides", nargs="*", metavar="key=value")
    options = arguments.parse_intermixed_args()
    num_images = math.ceil(options.gib * 2**30 / PATCH_BYTES)
    num_steps = math.ceil(num_images / PROMPTS_PER_STEP)
    with tempfile.TemporaryDirectory(prefix="yatt-bench-data-") as folder:
        data = Path(folder)
        write_images(data / "train-000000.tar", num_steps * PROMPTS_PER_STEP, seed=0)
        write_images(data / "eval-000000.tar", 8, seed=1)
        big_model(data / "model")
        fixed = [
            "run.name=controller_memory",
            f"model.path={data / 'model'}",
            f"data.train={data}/train-*.tar",
            f"data.eval={data}/eval-*.tar",
            f"train.steps={num_steps}",
            f"train.prompts_per_step={PROMPTS_PER_STEP}",
            "rollout.group_size=2",
            "rollout.max_model_len=512",
            "eval.every=0",
            "checkpoint.every=0",
            "dataplane.memory=512MiB",
        ]
        records = run_and_read("configs/digits_cpu.yaml", [*fixed, *options.overrides])
    show("Controllers and pixels", measure(records), as_json=options.json)


def measure(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows: the memory of the largest controller at the first and the last step, and the bytes of pixels in the
    run."""
    resident = [record["controller/rss_bytes_max"] for record in records]
    seconds = sum(record["time/step_s"] for record in records)
    return [
        {"path": "controller/first_step", "bytes": int(resident[1]), "seconds": seconds},
        {"path": "controller/last_step", "bytes": int(resident[-1]), "seconds": seconds},
        {"path": "controller/growth", "bytes": int(max(resident) - resident[0]), "seconds": seconds},
        {"path": "patches/made", "bytes": int(records[-1]["dataplane/processed_bytes"]), "seconds": seconds},
        {
            "path": "patches/resolved_by_trainers",
            "bytes": int(sum(record.get("dataplane/resolved_bytes", 0) for record in records)),
            "seconds": seconds,
        },
    ]


def write_images(path: Path, count: int, *, seed: int) -> None:
    """Write `count` digits as JPEGs into one WebDataset shard; no two are equal."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    with webdataset.TarWriter(str(path)) as shard:
        for number in range(count):
            scan = digits.images[number % len(digits.images)] * 15.0
            large = np.asarray(Image.fromarray(scan.astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
            grainy = np.clip(large[..., None] + rng.integers(0, 24, (SIDE, SIDE, 3)), 0, 255).astype(np.uint8)
            encoded = io.BytesIO()
            Image.fromarray(grainy).save(encoded, "JPEG", quality=80)
            answer = str(digits.target[number % len(digits.images)])
            fields = {"question": "What digit is this?", "answer": answer}
            shard.write({"__key__": f"{number:06d}", "jpg": encoded.getvalue(), "json": fields})


def big_model(directory: Path) -> None:
    """Write the example's model with a processor that keeps the images at full size."""
    shutil.copytree(EXAMPLE_MODEL, directory)
    for name in ("preprocessor_config.json", "processor_config.json"):
        file = directory / name
        if file.exists():
            tree = json.loads(file.read_text())
            for part in (tree, tree.get("image_processor", {})):
                if "size" in part:
                    part["size"] = {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}
                for key in ("min_pixels", "max_pixels"):
                    if part.get(key) is not None:
                        part[key] = 28 * 28 if key == "min_pixels" else SIDE * SIDE
            file.write_text(json.dumps(tree, indent=2))


if __name__ == "__main__":
    main()
