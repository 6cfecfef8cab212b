"""Small sets in the layouts of other projects, written as these document them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.dataplane.shards import encode, noise, write_tar
from tests.dataplane.tables import write_parquet

NUM_SAMPLES = 2
LAYOUTS = ("verl", "easyr1", "llava", "sharegpt", "openai", "swift", "webdataset")


def image(number: int) -> bytes:
    """Return an image that differs from every other number's."""
    return encode(noise(number), "JPEG", quality=95)


def write_all(folder: Path) -> dict[str, str]:
    """Write one set of each layout, with pictures beside it. Return its pattern by the layout's short name."""
    (folder / "pictures").mkdir(parents=True)
    for number in range(NUM_SAMPLES):
        (folder / "pictures" / f"{number}.jpg").write_bytes(image(number))
    numbers = range(NUM_SAMPLES)
    for name, make in (("verl", _verl), ("easyr1", _easyr1)):
        write_parquet(folder / f"{name}.parquet", pa.Table.from_pylist([make(number) for number in numbers]))
    (folder / "llava.json").write_text(json.dumps([_llava(number) for number in numbers], indent=2))
    (folder / "sharegpt.json").write_text(json.dumps([_sharegpt(number) for number in numbers]))
    for name, make in (("openai", _openai), ("swift", _swift)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(make(number)) + "\n" for number in numbers))
    members: dict[str, bytes] = {}
    for number in numbers:
        members |= {
            f"{number:04d}.jpg": image(number),
            f"{number:04d}.cls": str(number).encode(),
            f"{number:04d}.txt": f"What is in picture {number}?".encode(),
        }
    write_tar(folder / "webdataset.tar", members)
    endings = {"verl": "parquet", "easyr1": "parquet", "llava": "json", "sharegpt": "json", "webdataset": "tar"}
    return {name: str(folder / f"{name}.{endings.get(name, 'jsonl')}") for name in LAYOUTS}


def _question(number: int) -> str:
    return f"What is in picture {number}?"


def _verl(number: int) -> dict[str, Any]:
    """Return a sample as in verl's examples/data_preprocess/geo3k.py."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": f"<image>{_question(number)}"}],
        "images": [{"bytes": image(number), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": number, "answer": str(number), "question": _question(number)},
    }


def _easyr1(number: int) -> dict[str, Any]:
    """Return a sample as in the set hiyouga/geometry3k, which EasyR1 trains on."""
    return {
        "images": [{"bytes": image(number), "path": None}],
        "problem": f"<image>{_question(number)}",
        "answer": str(number),
    }


def _llava(number: int) -> dict[str, Any]:
    """Return a sample as in LLaVA's docs/Finetune_Custom_Data.md."""
    return {
        "id": f"997bb945-{number}",
        "image": f"pictures/{number}.jpg",
        "conversations": [
            {"from": "human", "value": f"<image>\n{_question(number)}"},
            {"from": "gpt", "value": str(number)},
        ],
    }


def _sharegpt(number: int) -> dict[str, Any]:
    """Return a sample as in LLaMA-Factory's data/README.md, with an earlier turn and a system prompt."""
    return {
        "conversations": [
            {"from": "human", "value": "Hello"},
            {"from": "gpt", "value": "Hi"},
            {"from": "human", "value": f"<image>{_question(number)}"},
            {"from": "gpt", "value": str(number)},
        ],
        "system": "Be brief.",
        "images": [f"pictures/{number}.jpg"],
    }


def _openai(number: int) -> dict[str, Any]:
    """Return a sample as in OpenAI's guide to fine-tuning on images."""
    url = "data:image/jpeg;base64," + base64.b64encode(image(number)).decode()
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": _question(number)},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]},
            {"role": "assistant", "content": str(number)},
        ]
    }


def _swift(number: int) -> dict[str, Any]:
    """Return a sample as in ms-swift's guide to custom sets, for GRPO."""
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"<image>{_question(number)}"},
        ],
        "images": [f"pictures/{number}.jpg"],
        "solution": str(number),
    }
