"""A mixture of small training sets in the layouts of other projects, of samples with two images or a video, and a model
that takes them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from examples.digits.model import MAX_IMAGE_SIDE, build_model_folder
from examples.motion.prepare import TOKENIZER_TEXT
from tests.dataplane.clips import encode_video

SETS = {"verl": 48, "llava": 32, "swift": 16}
"""The samples of each training set, in the proportion of its weight; a run of three steps uses each sample once. The
first set has one sample more, which is too large for `data.filter`."""
NUM_EVAL, NUM_STEPS, NUM_PROMPTS = 6, 3, 32
NUM_MEDIA = {"verl": 2, "llava": 1, "swift": 2, "eval": 1}
SIDE, NUM_FRAMES = 336, 4
LARGE = 20
"""The sample that is too large."""
QUESTION = "What is it?"


def make(path: Path) -> None:
    """Write the sets and the model into a folder."""
    build_model_folder(path / "model", seed=0, text=TOKENIZER_TEXT)
    for file in (path / "model").glob("*processor_config.json"):  # its scans are smaller than these media
        file.write_text(file.read_text().replace(str(MAX_IMAGE_SIDE**2), str(SIDE**2)))
    draw = np.random.default_rng(0)
    write_verl(path / "verl.parquet", range(SETS["verl"] + 1), draw, large=LARGE)
    write_llava(path / "llava.json", range(SETS["llava"]), draw)
    write_swift(path / "swift.jsonl", range(SETS["swift"]), draw)
    write_llava(path / "eval.json", range(NUM_EVAL), draw)


def write_verl(path: Path, numbers: range, draw: np.random.Generator, *, large: int) -> None:
    """Write samples with two images, as verl writes them. The images of one of them, `large`, have more pixels."""
    rows = [
        {
            "data_source": "noise",
            "prompt": [{"role": "user", "content": f"<image>{QUESTION}<image>"}],
            "images": [{"bytes": _jpeg(draw, SIDE + 8 * (number == large)), "path": None} for _ in range(2)],
            "reward_model": {"style": "rule", "ground_truth": str(number % 10)},
        }
        for number in numbers
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=8)


def write_llava(path: Path, numbers: range, draw: np.random.Generator) -> None:
    """Write samples with one video, as LLaVA writes them."""
    samples = []
    for number in numbers:
        frames = draw.integers(0, 256, (NUM_FRAMES, SIDE, SIDE, 3), np.uint8)
        name = f"{path.stem}-{number}.mp4"
        (path.parent / name).write_bytes(encode_video(path.with_suffix(".mp4"), "mp4v", frames, fps=4.0))
        turns = [{"from": "human", "value": f"<video>\n{QUESTION}"}, {"from": "gpt", "value": str(number % 10)}]
        samples.append({"id": str(number), "video": name, "conversations": turns})
    path.write_text(json.dumps(samples))


def write_swift(path: Path, numbers: range, draw: np.random.Generator) -> None:
    """Write samples with two images, as ms-swift writes them."""
    with path.open("w") as lines:
        for number in numbers:
            names = [f"{path.stem}-{number}-{place}.jpg" for place in range(2)]
            for name in names:
                (path.parent / name).write_bytes(_jpeg(draw))
            turns = [{"role": "system", "content": "Look."}, {"role": "user", "content": f"<image><image>{QUESTION}"}]
            lines.write(json.dumps({"messages": turns, "images": names, "solution": str(number % 10)}) + "\n")


def media_of(path: Path, name: str) -> list[list[bytes]]:
    """Return the files of the images and videos of each sample of a set, in their order."""
    if name == "verl":
        return [[image["bytes"] for image in row["images"]] for row in pq.read_table(path / "verl.parquet").to_pylist()]
    if name == "swift":
        samples = [json.loads(line)["images"] for line in (path / "swift.jsonl").read_text().splitlines()]
    else:
        samples = [[sample["video"]] for sample in json.loads((path / f"{name}.json").read_text())]
    return [[(path / file).read_bytes() for file in files] for files in samples]


def _jpeg(draw: np.random.Generator, side: int = SIDE) -> bytes:
    image = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8)).save(image, "JPEG")
    return image.getvalue()
