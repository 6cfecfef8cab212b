"""Writes the samples of an example as WebDataset shards. The same samples give the same bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from webdataset import TarWriter

T = TypeVar("T")


def write_parts(
    directory: Path, parts: Sequence[tuple[str, Sequence[T], int]], members_of: Callable[[T], Mapping[str, Any]]
) -> list[Path]:
    """Write `<name>-000000.tar` and so on into `directory` for each part (name, samples, number of shards). Return
    their paths.

    `members_of` returns a sample's key as `__key__`, and its members by their endings: bytes, or a dictionary that
    becomes JSON.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, samples, num_shards in parts:
        for shard in range(num_shards):
            path = directory / f"{name}-{shard:06d}.tar"
            with path.open("wb") as file, TarWriter(file, encoder=False, mtime=0) as writer:
                for sample in samples[shard::num_shards]:
                    writer.write({key: _encoded(value) for key, value in members_of(sample).items()})
            paths.append(path)
    return paths


def _encoded(value: Any) -> Any:
    return json.dumps(value).encode() if isinstance(value, dict) else value
