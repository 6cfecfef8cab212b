"""Checks that the results of a run can be written: its folder, and the room for a checkpoint."""

from __future__ import annotations

import json
import math
import os
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
    """Check that the run's folder can be written, and that its disk has room for one checkpoint.

    Raises:
        ConfigError: with the path that is in the way, or with the bytes that are free and wanted.
    """
    folder = config.run_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise ConfigError(f"run.dir is {config.run.dir}: {there} is a file; wanted a folder, so choose another run.dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir is {config.run.dir}: {there} cannot be written; choose another run.dir")
    of_policy = BYTES_PER_FROZEN[config.model.dtype] if config.train.lora.rank else BYTES_PER_PARAMETER
    free, wanted = shutil.disk_usage(there).free, of_policy * _num_parameters("model.path", Path(config.model.path))
    if config.critic_path is not None:
        wanted += BYTES_PER_PARAMETER * _num_parameters("critic.path", Path(config.critic_path))
    if free < wanted:
        raise ConfigError(
            f"run.dir is {config.run.dir}: its disk has {_size(free)} free, and a checkpoint of this model takes "
            f"{_size(wanted)} at least; make room, or choose another run.dir"
        )


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
