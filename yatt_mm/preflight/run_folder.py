"""Checks that the results of a run can be written: its folder, and the room for a checkpoint."""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from models.weights.safetensors_header import LENGTH_BYTES, read_header
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config

BYTES_PER_PARAMETER = 12
"""What a checkpoint takes at least: a float32 weight and Adam's two moments."""
BYTES_PER_FROZEN = {"float32": 4, "bfloat16": 2}
"""What it takes of a weight that LoRA freezes, by the dtype of the model."""


def check_run_folder(config: Config) -> None:
    """Check that the run's folder and that of its checkpoints can be written, that there is room for one checkpoint,
    and that `checkpoint.copy_to` takes files.

    Raises:
        ConfigError: with the path that is in the way, or with the bytes that are free and wanted.
    """
    key, value, there = "run.dir", config.run.dir, _check_writable("run.dir", config.run.dir, config.run_dir)
    if config.checkpoint.dir is not None:
        key, value = "checkpoint.dir", config.checkpoint.dir
        there = _check_writable(key, value, Path(value))
    if config.checkpoint.copy_to is not None:
        _check_copies(config.checkpoint.copy_to)
    of_policy = BYTES_PER_FROZEN[config.model.dtype] if config.train.lora.rank else BYTES_PER_PARAMETER
    free, wanted = shutil.disk_usage(there).free, of_policy * _num_parameters("model.path", Path(config.model.path))
    if config.critic_path is not None:
        wanted += BYTES_PER_PARAMETER * _num_parameters("critic.path", Path(config.critic_path))
    if free < wanted:
        raise ConfigError(
            f"{key} is {value}: its disk has {_size(free)} free, and a checkpoint of this model takes "
            f"{_size(wanted)} at least; make room, or choose another {key}"
        )


def _check_writable(key: str, value: str, folder: Path) -> Path:
    """Return the part of a folder's path that is there. Raises ConfigError if it is no folder, or cannot be written."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise ConfigError(f"{key} is {value}: {there} is a file; wanted a folder, so choose another {key}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} is {value}: {there} cannot be written; choose another {key}")
    return there


def _check_copies(url: str) -> None:
    """Check that a small file can be written below a URL, read again, and removed."""
    from fsspec.core import url_to_fs  # most runs copy nothing

    try:
        filesystem, root = url_to_fs(url)
        file, text = f"{root.rstrip('/')}/.yatt-mm-{secrets.token_hex(4)}", b"a run writes here"
        filesystem.makedirs(root, exist_ok=True)
        filesystem.pipe_file(file, text)
        is_same = filesystem.cat_file(file) == text
        filesystem.rm_file(file)
    except Exception as error:  # each filesystem has errors of its own
        raise ConfigError(
            f"checkpoint.copy_to is {url}: a file cannot be written there ({type(error).__name__}: {error})"
        ) from error
    if not is_same:
        raise ConfigError(f"checkpoint.copy_to is {url}: a file that was written there came back with other content")


def _num_parameters(key: str, model_dir: Path) -> int:
    num = 0
    for file in model_dir.glob("*.safetensors"):
        try:
            header = read_header(file)
            tensors = json.loads(header)
            _check_size(key, file, LENGTH_BYTES + len(header), tensors)
            num += sum(math.prod(tensor["shape"]) for name, tensor in tensors.items() if name != "__metadata__")
        except (ValueError, AttributeError, LookupError, TypeError, MemoryError) as error:
            raise ConfigError(f"{key}: {file} is no safetensors file ({type(error).__name__}: {error})") from error
    return num


def _check_size(key: str, file: Path, num_header_bytes: int, tensors: dict[str, Any]) -> None:
    """Check that a file is as long as its header says."""
    ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
    wanted, found = num_header_bytes + max(ends, default=0), file.stat().st_size
    if found < wanted:
        raise ConfigError(f"{key}: {file} is incomplete: {found} bytes of {wanted}; download or copy it again")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.0f} MB"
