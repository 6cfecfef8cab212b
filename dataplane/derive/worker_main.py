"""The main program of a decode worker: it decodes one medium at a time and writes the result into memory that it
shares with the node alone.

It is started with `python -m dataplane.derive.worker_main SETTINGS`, the JSON of `WorkerSettings`. The node sends jobs
over a socket, each with the encoded bytes, or with an open file that has them. The worker replies with JSON frames:
`read` when it has the bytes, `need` with the number of bytes of the result (the node then says whether it has room),
and `done`; or `bad` (the medium is at fault) or `failed` (the bytes cannot be read, or do not have the digest). It ends
when the socket closes.

Before the first medium it gives up what decoding does not need (`syscall_filter.py`).
"""

import json
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from PIL import Image

from dataplane.core.digests import content_digest
from dataplane.core.process import keep_freed_memory, limit_memory, signal_on_parent_death
from dataplane.datasets.formats.range_files import read_open
from dataplane.derive import syscall_filter
from dataplane.derive.result_memory import map_result_memory
from dataplane.derive.worker_settings import WorkerSettings
from dataplane.media.images import decode_image
from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import MediaLimits
from dataplane.media.recipes import parse_recipe
from dataplane.media.recipes.kernel import Kernel, Plan, VideoRecipe
from dataplane.media.videos import Video, load_decoder

Frame = Mapping[str, Any]

_BYTES_PER_PIXEL = 48
"""The memory per pixel of the biggest medium: 16-bit grey passes through 64-bit integers, and a video decoder keeps up
to 16 frames at 1.5 bytes."""
_BASE_BYTES = 4 << 30
"""The memory in bytes for libraries, thread stacks, freed memory that malloc keeps, the frames of a chunk and the
results of kernels."""


def main(settings: WorkerSettings) -> None:
    """Serve jobs until the node closes its end of the socket."""
    keep_freed_memory(32 << 20, 256 << 20)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal_on_parent_death(signal.SIGTERM)
    memory = map_result_memory(settings.result_fd, settings.result_bytes)
    limit_memory(allowed_bytes(settings.limits))
    Image.init()  # now, and not within the time limit of the first medium
    worker = Worker(settings, memory)
    if settings.is_filtered:
        syscall_filter.give_up_calls()
    worker.serve()


def allowed_bytes(limits: MediaLimits) -> int:
    """Return how many bytes a worker may map in addition to its result memory: enough for any medium within the
    limits, and a bound for all others."""
    return _BASE_BYTES + 4 * limits.max_media_bytes + _BYTES_PER_PIXEL * limits.max_image_pixels


class Worker:
    """The worker's end of the socket. Everything that must be opened or imported is so when this is made."""

    def __init__(self, settings: WorkerSettings, memory: np.ndarray) -> None:
        self._limits = settings.limits
        self._memory = memory
        self._socket = socket.socket(fileno=settings.socket_fd)
        self._connection = Connection(os.dup(settings.socket_fd))
        self._missing = ""
        """The reason why the decoder of videos cannot be used, or an empty string."""
        try:
            if settings.decoder is not None:
                load_decoder(settings.decoder)
        except ImportError as error:
            self._missing = f"the decoder {settings.decoder} is not installed beside this node: {error}"

    def serve(self) -> None:
        """Run one job after another until the node closes its end."""
        while True:
            try:
                job = json.loads(self._connection.recv_bytes())
                self._send(self._run(job))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return

    def _run(self, job: Frame) -> Frame:
        """Decode the medium, ask for room, and write the result. Return the last frame of the job."""
        kernel = parse_recipe(job["recipe"])
        try:
            data = self._read(job)
        except (OSError, MemoryError) as error:
            return {"failed": f"cannot read {job['path']}: {error}"}
        if job["nbytes"] > self._limits.max_media_bytes:
            return {"bad": f"{job['nbytes']} encoded bytes; at most {self._limits.max_media_bytes} are read"}
        # the node has hashed what it sent itself
        if job["is_file"] and content_digest(data, on_one_core=True) != job["digest"]:
            return {"failed": f"the bytes of {job['label']} are not those that were ingested: the shard changed"}
        if kernel.medium == "video" and self._missing:
            return {"failed": self._missing}
        self._send({"read": True})
        try:
            source, found = _decode(kernel, data, tuple(job["formats"]), self._limits)
            plan = _plan(kernel, source)
            nbytes = math.prod(plan.shape)
            self._send({"need": nbytes})
            if not json.loads(self._connection.recv_bytes())["has_room"]:
                return {"failed": "no room"}
            plan.write(self._memory[:nbytes])
        except UndecodableError as error:
            return {"bad": str(error)}
        except MemoryError:
            return {
                "bad": f"it takes more than the {allowed_bytes(self._limits)} bytes that a worker of this node may use"
            }
        done = {
            "shape": plan.shape,
            "meta": {**plan.meta, "medium": kernel.medium, "source_size": [source.height, source.width]},
            "pixel_bytes": plan.pixel_bytes,
            "format": found,
        }
        return {"done": done}

    def _read(self, job: Frame) -> bytes:
        """Return the encoded bytes of a job. Those of a medium that is too big are not read from its file."""
        if not job["is_file"]:
            return self._connection.recv_bytes()
        _, (fd,), _, _ = socket.recv_fds(self._socket, 1, 1)
        try:
            return read_open(fd, job["offset"], min(job["nbytes"], self._limits.max_media_bytes))
        finally:
            os.close(fd)

    def _send(self, frame: Frame) -> None:
        self._connection.send_bytes(json.dumps(frame).encode())


def _decode(kernel: Kernel, data: bytes, formats: tuple[str, ...], limits: MediaLimits) -> tuple[Any, str]:
    if not isinstance(kernel, VideoRecipe):
        return decode_image(data, formats, limits)
    video = Video(data, formats, limits, kernel.decoder)
    return video, video.format


def _plan(kernel: Kernel, source: Any) -> Plan:
    try:
        return kernel.plan(source)
    except UndecodableError:
        raise
    except ValueError as error:
        raise UndecodableError(f"cannot be made into {kernel.kernel}: {error}") from error


if __name__ == "__main__":
    main(WorkerSettings.from_json(sys.argv[1]))
