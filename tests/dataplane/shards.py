"""Small real inputs for the tests of the data plane: images, tar shards and recipes; also waiting for a condition."""

import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image

RECIPE: Mapping[str, Any] = {
    "kernel": "qwen_vl_patches",
    "version": 1,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 256 * 256,
    "resample": "bicubic",
}


def noise(seed: int, height: int = 56, width: int = 56) -> np.ndarray:
    """Return an image that cannot be compressed and differs from the image of every other seed."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encode(image: np.ndarray | Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return the encoded bytes of an image."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(buffer, kind, **options)
    return buffer.getvalue()


def write_tar(path: Path, members: Mapping[str, bytes], tar_format: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar with these members in this order."""
    with tarfile.open(path, "w", format=tar_format) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_shard(path: Path, images: Mapping[str, bytes]) -> Path:
    """Write a WebDataset shard: for each image `<key>.png`, and `<key>.json` with the key as the answer."""
    members: dict[str, bytes] = {}
    for key, data in images.items():
        members |= {f"{key}.png": data, f"{key}.json": json.dumps({"answer": key}).encode()}
    return write_tar(path, members)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return as soon as the condition holds; fail after the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout_s} s"
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    """Return True if a process has ended. Another thread may reap it at any moment, and its number may be used
    again."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def segments(pid: int) -> set[Path]:
    """Return the segments that a running node maps. Other nodes on this machine do not count."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[5]) for line in lines if "/dev/shm/dataplane-" in line}


def existing(paths: set[Path]) -> set[Path]:
    """Return those of the paths that still exist."""
    return {path for path in paths if path.exists()}
