"""Tests of a killed worker that does not end, as one that waits for a disk: its room is given back at once, because it
cannot write there, and no caller waits for it for ever."""

import subprocess
import threading
import time
from pathlib import Path

import pytest

from dataplane.derive import worker_handle
from dataplane.derive.worker_handle import Job, Room, WorkerHandle, WorkerOverdueError
from dataplane.media.limits import MediaLimits
from dataplane.storage.arena import Segment
from dataplane.storage.entries import Slab
from tests.dataplane.shards import RECIPE, encode, noise, wait_until


def test_a_worker_that_does_not_end_takes_no_room_and_no_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_handle, "END_TIMEOUT_S", 0.3)
    data = encode(noise(0))
    segment = Segment(1 << 20, "test", tmp_path)
    handle = WorkerHandle(segment.capacity, MediaLimits(max_decode_seconds=5), is_filtered=False)
    gone, returned = threading.Event(), []
    wait = handle._process.wait

    def wait_as_for_a_disk(timeout: float | None = None) -> int:
        if not gone.wait(timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        return wait(30)

    def allocate(nbytes: int) -> Slab:
        monkeypatch.setattr(handle, "_decode", overdue)  # from now on the worker takes too long
        return Slab(0, nbytes)

    def overdue() -> None:
        raise WorkerOverdueError(worker_handle.Result(bad="too long"))

    monkeypatch.setattr(handle._process, "wait", wait_as_for_a_disk)
    job = Job(label="a", path=None, offset=0, nbytes=len(data), digest="", formats=(), recipe=RECIPE, data=data)
    room = Room(allocate=allocate, view=lambda slab: segment.bytes[: slab.nbytes], abort=returned.append)
    try:
        started = time.monotonic()
        with pytest.raises(WorkerOverdueError):
            handle.run(job, room)
        assert time.monotonic() - started < 60
        assert f"worker {handle.pid} was killed and has not ended in 0.3 s" in caplog.text
        assert len(returned) == 1
        gone.set()
        wait_until(lambda: "which had been killed, has ended" in caplog.text)
        handle.close()
        assert len(returned) == 1
    finally:
        gone.set()
        handle.close()
        segment.unlink()
