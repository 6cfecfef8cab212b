"""The main program of a decode worker: it decodes one medium at a time and writes the result straight into the node's
arena.

It is started with `python -m dataplane.derive.worker_main SEGMENT FD LIMITS`. The node sends jobs over the socket FD,
each with the encoded bytes if the node has read them. The worker replies with JSON frames: `read` when it has the
bytes, `need` with the number of bytes of the result (the node then says where to write them), and `done`; or `bad` (the
medium is at fault) or `failed` (the bytes cannot be read, or do not have the digest). It ends when the socket closes.
"""

import ctypes
import json
import math
import mmap
import os
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dataplane.core.digests import content_digest
from dataplane.core.process import keep_freed_memory, limit_memory, signal_on_parent_death
from dataplane.datasets.formats.range_files import read_local
from dataplane.media.images import decode_image
from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import MediaLimits
from dataplane.media.recipes import parse_recipe
from dataplane.media.recipes.kernel import Kernel, Plan
from dataplane.media.videos import Video

Frame = Mapping[str, Any]

EAGER_BYTES = 4 << 30
"""The bytes of the arena that a worker enters into its page table at its start. A GiB takes 2 MB of page table."""
_BYTES_PER_PIXEL = 48
"""The memory per pixel of the biggest medium: 16-bit grey passes through 64-bit integers, and a video decoder keeps up
to 16 frames at 1.5 bytes."""
_BASE_BYTES = 4 << 30
"""The memory in bytes for libraries, thread stacks, freed memory that malloc keeps, the frames of a chunk and the
results of kernels."""
_FAULT_IN_BYTES = 4 << 20
_MADV_POPULATE_WRITE = 23


def main(segment: str, fd: int, limits: MediaLimits) -> None:
    """Serve jobs until the node closes its end of the socket."""
    keep_freed_memory(32 << 20, 256 << 20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGTERM)
    arena = map_segment(Path(segment))
    limit_memory(allowed_bytes(limits))
    threading.Thread(target=fault_in, args=(arena[:EAGER_BYTES],), name="fault in", daemon=True).start()
    Image.init()  # now, and not within the time limit of the first medium
    connection = Connection(fd)
    while True:
        try:
            job = json.loads(connection.recv_bytes())
            data = connection.recv_bytes() if job["has_data"] else None
            send(connection, run_job(connection, arena, job, data, limits))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return


def allowed_bytes(limits: MediaLimits) -> int:
    """Return how many bytes a worker may map in addition to the arena: enough for any medium within the limits, and a
    bound for all others."""
    return _BASE_BYTES + 4 * limits.max_media_bytes + _BYTES_PER_PIXEL * limits.max_image_pixels


def map_segment(path: Path) -> np.ndarray:
    """Return the node's arena, mapped writable. The node that started this process gives the path of the file."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # no page faults while a medium is written
        return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size, flags=flags), np.uint8)
    finally:
        os.close(fd)


def fault_in(arena: np.ndarray) -> None:
    """Enter the arena into this process's page table. If the system did this page by page during the writing, it would
    cost many times more."""
    libc = ctypes.CDLL(None, use_errno=True)
    for at in range(0, arena.nbytes, _FAULT_IN_BYTES):
        part = arena[at : at + _FAULT_IN_BYTES]
        if libc.madvise(ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(part.nbytes), _MADV_POPULATE_WRITE):
            return  # on a kernel before 5.14 each page is entered at its first use


def send(connection: Connection, frame: Frame) -> None:
    """Send one JSON frame."""
    connection.send_bytes(json.dumps(frame).encode())


def run_job(connection: Connection, arena: np.ndarray, job: Frame, data: bytes | None, limits: MediaLimits) -> Frame:
    """Decode the medium, ask for room, and write the result. Return the last frame of the job. The medium is read first
    if the node did not send its bytes."""
    kernel = parse_recipe(job["recipe"])
    if job["nbytes"] > limits.max_media_bytes:
        return {"bad": f"{job['nbytes']} encoded bytes; at most {limits.max_media_bytes} are read"}
    if data is None:
        try:
            data = _read_source(arena, job)
        except (OSError, MemoryError) as error:
            return {"failed": f"cannot read {job['path']}: {error}"}
        # the node has hashed what is in the arena
        if job["path"] is not None and content_digest(data, on_one_core=True) != job["digest"]:
            return {"failed": f"the bytes of {job['label']} are not those that were ingested: the shard changed"}
    send(connection, {"read": True})
    try:
        source, found = _decode(kernel.medium, data, tuple(job["formats"]), limits)
        plan = _plan(kernel, source)
        nbytes = math.prod(plan.shape)
        send(connection, {"need": nbytes})
        offset = json.loads(connection.recv_bytes())["offset"]
        if offset is None:
            return {"failed": "no room"}
        out = arena[offset : offset + nbytes]
        plan.write(out)
    except UndecodableError as error:
        return {"bad": str(error)}
    except MemoryError:
        return {"bad": f"it takes more than the {allowed_bytes(limits)} bytes that a worker of this node may use"}
    done = {
        "shape": plan.shape,
        "meta": {**plan.meta, "medium": kernel.medium, "source_size": [source.height, source.width]},
        "checksum": content_digest(out, on_one_core=True),  # the other cores have workers too
        "pixel_bytes": plan.pixel_bytes,
        "format": found,
    }
    return {"done": done}


def _decode(medium: str, data: bytes, formats: tuple[str, ...], limits: MediaLimits) -> tuple[Any, str]:
    if medium == "image":
        return decode_image(data, formats, limits)
    video = Video(data, formats, limits)
    return video, video.format


def _plan(kernel: Kernel, source: Any) -> Plan:
    try:
        return kernel.plan(source)
    except UndecodableError:
        raise
    except ValueError as error:
        raise UndecodableError(f"cannot be made into {kernel.kernel}: {error}") from error


def _read_source(arena: np.ndarray, job: Frame) -> bytes:
    if job["path"] is None:
        return arena[job["offset"] : job["offset"] + job["nbytes"]].tobytes()
    return read_local(job["path"], job["offset"], job["nbytes"], no_links=job["no_links"])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), MediaLimits(**json.loads(sys.argv[3])))
