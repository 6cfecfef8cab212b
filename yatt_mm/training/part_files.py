"""The files of a checkpoint's tensors: each rank writes its boxes of them into one file, and reads what it needs from
all.

The files have the format of safetensors, so other programs read them too. Each tensor in a file is one box, and its
name says of which tensor it is and where it begins: `exp_avg/decoder.weight@128,0`. Nothing in them is code.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open

from dataplane.core.disk_sync import sync_file
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import FileRecord
from yatt_mm.common.progress import PROGRESS
from yatt_mm.training.boxes import Box

FORMAT = "1"
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
ALIGNMENT = 8
STRETCH_BYTES = 256 << 20
"""What is written between two syncs. One sync of a large file at its end could take minutes, in which the rank would
seem to stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One box of a tensor, with its values."""

    name: str
    """The name of the tensor in the checkpoint."""
    box: Box
    values: torch.Tensor
    """[elements of the box] in memory order, in host memory."""


def part_name(rank: int, num_ranks: int) -> str:
    """Return the name of a rank's file."""
    return f"part-{rank:05d}-of-{num_ranks:05d}.safetensors"


def write_part(path: Path, pieces: Sequence[Piece], settings: dict[str, str]) -> FileRecord:
    """Write a rank's file, bring it to the disk, and return its record. `settings`: texts that `Parts` finds again.

    The values are written from where they are: no second copy of them is made. Raises OSError.
    """
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, **settings}}
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.values.nbytes
        where = f"{piece.name}@{','.join(map(str, piece.box.offset))}"
        dtype = DTYPES[piece.values.dtype]
        header[where] = {"dtype": dtype, "shape": list(piece.box.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    digest, nbytes, num_synced = blake3(max_threads=blake3.AUTO), 0, 0
    with path.open("wb") as file:
        for values in (memoryview(len(text).to_bytes(8, "little") + text), *map(_as_bytes, pieces)):
            digest.update(values)
            nbytes += len(values)
            file.write(values)
            if nbytes - num_synced >= STRETCH_BYTES:
                file.flush()
                sync_file(path)
                num_synced = nbytes
            PROGRESS.tick()
    sync_file(path)
    return FileRecord(nbytes=nbytes, blake3=digest.hexdigest())


class Parts:
    """The tensors of a checkpoint, read from the files of all ranks."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        """Read those whose names, and settings, begin with `prefix`, which is left out. Raises CheckpointError if a
        rank's file is missing or cannot be read."""
        found = {path.name for path in folder.glob("part-*.safetensors")}
        numbers = [re.fullmatch(r"part-\d+-of-(\d+)\.safetensors", name) for name in found]
        num_ranks = max((int(number[1]) for number in numbers if number), default=1)
        wanted = {part_name(rank, num_ranks) for rank in range(num_ranks)}
        for name in sorted(wanted ^ found):
            what = "is missing" if name in wanted else "is of another save"
            raise CheckpointError(f"no finished checkpoint in {folder}: {name} {what}; resume from another checkpoint")
        self._folder = folder
        self._boxes: dict[str, list[tuple[Box, Any, str]]] = defaultdict(list)
        """[tensor] its boxes, the file that each is in, and its name there."""
        self.settings: dict[str, str] = {}
        for name in sorted(wanted):
            try:
                file = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / name} is damaged: {error}; resume from another checkpoint") from None
            self.settings = {
                key.removeprefix(prefix): text for key, text in file.metadata().items() if key.startswith(prefix)
            }
            for where in file.keys():  # noqa: SIM118 (it is no dict)
                if not where.startswith(prefix):
                    continue
                tensor, _, offset = where.removeprefix(prefix).rpartition("@")
                shape = tuple(file.get_slice(where).get_shape())
                box = Box(offset=tuple(map(int, offset.split(","))), shape=shape)
                self._boxes[tensor].append((box, file, where))

    def read(self, name: str, box: Box, out: torch.Tensor) -> int:
        """Fill `out`, of the shape of `box`, with that box of a tensor, as far as the checkpoint has it. Return the
        number of elements that were filled."""
        num_filled = 0
        for saved, file, where in self._boxes.get(name, ()):
            if common := saved.overlap(box):
                values = file.get_slice(where)[common.inside(saved)]
                out[common.inside(box)].copy_(values)
                num_filled += common.numel
        PROGRESS.tick()
        return num_filled

    def extent(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a whole tensor as it was saved; None if the checkpoint does not have it."""
        boxes = [box for box, *_ in self._boxes.get(name, ())]
        ends = ([at + length for at, length in zip(box.offset, box.shape)] for box in boxes)
        return tuple(map(max, zip(*ends))) if boxes else None


def _as_bytes(piece: Piece) -> memoryview:
    return piece.values.view(torch.uint8).numpy().data
