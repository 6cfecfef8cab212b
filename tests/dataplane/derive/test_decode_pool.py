"""Tests of workers that hang, crash or are killed: the node continues, the medium is derived or quarantined, and
nothing leaks."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from dataplane.core.refs import BadMedia, Ref
from dataplane.derive import quarantine
from dataplane.derive.worker_main import allowed_bytes
from dataplane.media.limits import MediaLimits
from dataplane.media.recipes import parse_recipe
from dataplane.media.videos import Video
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from dataplane.storage.entries import Slab
from tests.dataplane.clips import encode_video, h264, moving, sound
from tests.dataplane.derive.deriving import derive, read
from tests.dataplane.media.test_processors import VIDEO_RECIPE, run_video_kernel
from tests.dataplane.shards import RECIPE, encode, has_ended, noise, wait_until, write_tar

FRAMES = {
    "kernel": "frames",
    "version": 1,
    "sampling": {"by": "count", "rule": "qwen3_vl", "num_frames": 4},
}


def torn_avi_that_claims_to_be_whole(path: Path) -> bytes:
    """Return a torn AVI whose first header claims that it is complete. decord 0.6 would crash on it."""
    data = bytearray(encode_video(path, "MJPG", moving()))
    del data[len(data) // 2 :]
    data[4:8] = (len(data) - 8).to_bytes(4, "little")
    return bytes(data)


@pytest.fixture(scope="module")
def big_png() -> bytes:
    """Return an image of 400 kB that takes more than a second to decode and resize."""
    return encode(Image.new("RGB", (11_000, 11_000), (10, 20, 30)), "PNG", compress_level=1)


@pytest.fixture
def shard(tmp_path: Path, big_png: bytes) -> Path:
    members = {
        "a.mp4": h264(),
        "b.webm": encode_video(tmp_path / "b.webm", "VP90", moving()),
        "c.avi": torn_avi_that_claims_to_be_whole(tmp_path / "c.avi"),
        "d.mp4": h264()[:3000],
        "e.mp4": sound(),
        "f.webm": h264(),
        "g.png": encode(noise(0)),
        "h.png": big_png,
    }
    return write_tar(tmp_path / "a.tar", members)


def start(shard: Path, **limits: Any) -> Node:
    return Node(NodeConfig(memory_bytes=8 << 20, roots={"a": [str(shard)]}, limits=MediaLimits(**limits)))


@pytest.fixture
def node(shard: Path) -> Iterator[Node]:
    started = start(shard)
    yield started
    started.stop()


def stopped_at_its_place(node: Node, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Stop the only worker when it gets its next slab. The event is set when it has stopped."""
    (pid,) = node.services.pool.pids()
    is_stopped, allocate = threading.Event(), node.services.store.allocate

    def stop_and_allocate(nbytes: int, deadline: float, scope: str | None = None) -> Slab:
        slab = allocate(nbytes, deadline, scope)
        if not is_stopped.is_set():
            os.kill(pid, signal.SIGSTOP)
            is_stopped.set()
        return slab

    monkeypatch.setattr(node.services.store, "allocate", stop_and_allocate)
    return is_stopped


def empty(node: Node) -> None:
    """Check that the arena is empty, so nothing was leaked."""
    slab = node.services.store.allocate(8 << 20, time.monotonic() + 20)
    node.services.store.abort(slab)
    assert node.services.store.stat()["used_bytes"] == 0


def test_videos_of_a_shard_become_patches_and_frames_with_their_times(node: Node) -> None:
    patches, other = derive(node, [0, 1], VIDEO_RECIPE)
    expected, meta = run_video_kernel(Video(h264()), VIDEO_RECIPE)
    assert np.array_equal(read(node, patches), expected)
    assert isinstance(patches, Ref) and isinstance(other, Ref)
    assert {key: patches.meta[key] for key in meta} == meta and patches.meta["checksum"]
    frames = derive(node, [0, 1], FRAMES)
    assert np.array_equal(read(node, frames[0]), np.stack(list(Video(h264()).frames([0, 8, 16, 24]))))
    assert other.shape == patches.shape and node.stat()["num_quarantined"] == 0


@pytest.mark.parametrize("decoder", ["pyav", "decord"])
def test_bad_videos_are_set_aside_and_the_others_are_made(node: Node, decoder: str) -> None:
    results = derive(node, [0, 2, 3, 4, 5, 6, 1], FRAMES | {"decoder": decoder})
    reasons = [result.reason if isinstance(result, BadMedia) else "" for result in results]
    assert [bool(reason) for reason in reasons] == [False, True, True, True, True, True, False]
    assert "truncated: its list movi takes bytes" in reasons[1]
    assert "truncated" in reasons[2]
    assert "no video stream" in reasons[3]
    assert "named as WEBM, holds MP4" in reasons[4]
    assert "not a video of a known container" in reasons[5]
    (image,) = derive(node, [0], RECIPE)
    assert isinstance(image, BadMedia) and "not an image of a known format" in image.reason
    empty(node)


def test_a_decode_that_takes_too_long_is_killed_and_its_medium_set_aside_for_a_while(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = start(shard, max_decode_seconds=12.0)
    try:
        derive(node, [6], RECIPE)
        before = [psutil.Process(pid) for pid in node.services.pool.pids()]
        monkeypatch.setattr(quarantine, "EXPIRY_S", 5.0)
        is_stopped = stopped_at_its_place(node, monkeypatch)
        slow, good = derive(node, [7, 0], RECIPE | {"min_pixels": 100 * 100})[0], derive(node, [6], RECIPE)[0]
        assert isinstance(slow, BadMedia) and "not decoded in 12 s, which is the limit of this node" in slow.reason
        assert is_stopped.is_set()
        assert isinstance(good, Ref)
        assert before and all(has_ended(worker) for worker in before)
        empty(node)
        wait_until(lambda: slow.name not in [one.name for one in node.services.deriver.quarantine()])
        assert node.stat()["num_quarantined"] == 1  # what is no image stays
    finally:
        node.stop()


def test_media_above_a_limit_of_the_node_are_refused(shard: Path) -> None:
    node = start(shard, max_media_bytes=12_000, max_image_pixels=3100, max_video_frames=24)
    try:
        reasons = [result.reason for result in derive(node, [6, 7], RECIPE) if isinstance(result, BadMedia)]
        assert "56x56 = 3136 pixels; at most 3100 are decoded" in reasons[0]
        assert "encoded bytes; at most 12000 are read" in reasons[1]
        (video,) = derive(node, [1], VIDEO_RECIPE)
        assert isinstance(video, BadMedia) and "more than 24 frames; at most 24" in video.reason
    finally:
        node.stop()


def test_a_worker_may_use_as_much_memory_as_the_limits_of_media_take_and_no_more(node: Node) -> None:
    derive(node, [6], RECIPE)
    (worker,) = (psutil.Process(pid) for pid in node.services.pool.pids())
    allowed, _ = worker.rlimit(psutil.RLIMIT_AS)
    assert 0 < allowed <= worker.memory_info().vms + allowed_bytes(MediaLimits())
    worker.rlimit(psutil.RLIMIT_AS, (worker.memory_info().vms + (256 << 20), -1))
    (big,) = derive(node, [7], RECIPE)
    assert isinstance(big, BadMedia) and "bytes that a worker of this node may use" in big.reason
    assert worker.is_running() and isinstance(derive(node, [6], RECIPE)[0], Ref)
    empty(node)


def test_a_worker_that_is_killed_in_the_middle_is_replaced_and_the_medium_made(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    derive(node, [6], RECIPE)
    empty(node)
    (pid,) = node.services.pool.pids()
    made: list[Ref | BadMedia] = []
    is_stopped = stopped_at_its_place(node, monkeypatch)
    asking = threading.Thread(target=lambda: made.extend(derive(node, [7], RECIPE)))
    asking.start()
    assert is_stopped.wait(60)
    os.kill(pid, signal.SIGKILL)
    asking.join(90)
    (ref,) = made
    assert node.services.pool.pids() != [pid] and node.stat()["num_quarantined"] == 0
    plan = parse_recipe(RECIPE).plan(Image.new("RGB", (11_000, 11_000), (10, 20, 30)))
    expected = np.empty(plan.shape, np.uint8)
    plan.write(expected.reshape(-1))
    assert np.array_equal(read(node, ref), expected)
    empty(node)
