"""A worker of the node's pool: decodes one medium at a time and writes the result straight into the node's arena.

Started as `python -m dataplane.pool_worker SEGMENT FD`. It answers on the socket FD with JSON frames: for a job it
sends either `need` (how many bytes, waits for the offset, writes, then sends `done`), `bad` (the medium is at fault) or
`failed` (the bytes cannot be read, or are not those of the digest). It ends when the socket does.
"""

import json
import mmap
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.byte_ranges import read_local
from dataplane.digests import content_digest
from dataplane.media import MAX_SOURCE_BYTES, UndecodableError, decode_image, image_format
from dataplane.process import signal_on_parent_death
from dataplane.recipes import parse_recipe

Frame = Mapping[str, Any]


def main(segment: str, fd: int) -> None:
    """Serve jobs until the node closes its end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGTERM)
    arena = map_segment(Path(segment))
    connection = Connection(fd)
    while True:
        try:
            job = json.loads(connection.recv_bytes())
            send(connection, run_job(connection, arena, job))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def map_segment(path: Path) -> np.ndarray:
    """The node's arena, writable."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
    finally:
        os.close(fd)


def send(connection: Connection, frame: Frame) -> None:
    """One JSON frame."""
    connection.send_bytes(json.dumps(frame).encode())


def run_job(connection: Connection, arena: np.ndarray, job: Frame) -> Frame:
    """Read, check, decode, ask for room, compute; returns the last frame of the job."""
    recipe = parse_recipe(job["recipe"])
    if job["nbytes"] > MAX_SOURCE_BYTES:
        return {"bad": f"{job['nbytes']} encoded bytes; at most {MAX_SOURCE_BYTES} are read"}
    try:
        data = _read_source(arena, job)
    except OSError as error:
        return {"failed": f"cannot read {job['path']}: {error}"}
    if content_digest(data) != job["digest"]:
        return {"failed": f"the bytes of {job['label']} are not those that were ingested: the shard changed"}
    try:
        image = decode_image(data, job["formats"])
        found = image_format(data)
        grid = recipe.grid(image.height, image.width)
    except UndecodableError as error:
        return {"bad": str(error)}
    except ValueError as error:
        return {"bad": f"cannot be cut into patches: {error}"}
    shape = recipe.shape(grid)
    nbytes = shape[0] * shape[1]
    send(connection, {"need": nbytes})
    offset = json.loads(connection.recv_bytes())["offset"]
    if offset is None:
        return {"failed": "no room"}
    out = arena[offset : offset + nbytes]
    recipe.run(image, grid, out.reshape(shape))
    pixel_bytes = image.width * image.height * 3
    return {
        "done": {
            "shape": shape,
            "meta": recipe.meta(grid),
            "checksum": content_digest(out),
            "pixel_bytes": pixel_bytes,
            "format": found,
        }
    }


def _read_source(arena: np.ndarray, job: Frame) -> bytes:
    if job["path"] is None:
        return arena[job["offset"] : job["offset"] + job["nbytes"]].tobytes()
    return read_local(job["path"], job["offset"], job["nbytes"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
