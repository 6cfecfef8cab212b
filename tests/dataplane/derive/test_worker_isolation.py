"""Tests of what a decode worker has and may do: its environment, its memory, its calls of the system, and what the node
believes of it. Some run `hostile_worker.py` instead of the real one."""

import ctypes
import ctypes.util
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dataplane.core.child_process import PASSED_ON
from dataplane.core.digests import content_digest
from dataplane.core.refs import BadMedia, Ref
from dataplane.core.seccomp import why_unavailable
from dataplane.derive import decode_pool, worker_handle
from dataplane.derive.result_memory import KEPT_BYTES, ResultMemory, map_result_memory
from dataplane.derive.syscall_filter import ALLOWED, CHECKED
from dataplane.media.images import decode_image
from dataplane.media.videos import DEFAULT_DECODER, Video, VideoDecoder
from dataplane.server.config import NodeConfig
from dataplane.server.node import Node
from tests.dataplane.clips import encode_video, h264, moving
from tests.dataplane.derive.deriving import derive, read
from tests.dataplane.media.test_videos import DECODERS, KINDS
from tests.dataplane.shards import RECIPE, encode, has_ended, noise, write_tar

RGB = {"kernel": "rgb", "version": 1}
FRAMES = {"kernel": "frames", "version": 1, "sampling": {"by": "count", "rule": "qwen3_vl", "num_frames": 5}}
needs_seccomp = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())


def start(folder: Path, members: dict[str, bytes]) -> Node:
    shard = write_tar(folder / "a.tar", members)
    return Node(NodeConfig(memory_bytes=4 << 20, roots={"a": [str(shard)]}))


def attack(name: str, argument: str = "") -> bytes:
    """Return a PNG that makes a hostile worker attack."""
    text, buffer = PngInfo(), io.BytesIO()
    text.add_text("attack", name)
    text.add_text("argument", argument)
    Image.fromarray(noise(len(name + argument))).save(buffer, "PNG", pnginfo=text)
    return buffer.getvalue()


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_handle, "MAIN_MODULE", "tests.dataplane.derive.hostile_worker")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, dict[str, bytes]]]:
    """A node with an image of every format and kind, and a video of every container and codec."""
    folder = tmp_path_factory.mktemp("zoo")
    image, turned = Image.fromarray(noise(1)), Image.Exif()
    turned[0x0112] = 6
    members = {f"{kind.lower()}.{kind.lower()}": encode(image, kind) for kind in ("PNG", "WEBP", "BMP", "GIF", "PPM")}
    members |= {f"tiff-{how}.tif": encode(image, "TIFF", compression=how) for how in ("raw", "tiff_lzw", "jpeg")}
    members |= {
        "jpeg.jpg": encode(image, "JPEG", progressive=True),
        "turned.jpg": encode(image, "JPEG", exif=turned),
        "cmyk.jpg": encode(image.convert("CMYK"), "JPEG"),
        "mpo.jpg": encode(image, "MPO", save_all=True, append_images=[image]),
        "palette.png": encode(image.convert("P"), "PNG"),
        "grey.png": encode(Image.fromarray(np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16), "PNG"),
        "moves.webp": encode(image, "WEBP", save_all=True, append_images=[image, image]),
    }
    for codec, extension, _ in KINDS:
        members[f"{codec}-{extension}.{extension}"] = encode_video(folder / f"a.{extension}", codec, moving())
    members["h264.mp4"] = h264()
    node = start(folder, members)
    yield node, members
    node.stop()


def test_a_worker_decodes_every_format_as_this_process_does(zoo: tuple[Node, dict[str, bytes]]) -> None:
    node, members = zoo
    images = [
        at for at, name in enumerate(members) if Path(name).suffix[1:] not in ("webm", "mkv", "mp4", "mov", "avi")
    ]
    assert len(images) == 15
    for at, ref in zip(images, derive(node, images, RGB), strict=True):
        assert np.array_equal(read(node, ref), np.asarray(decode_image(list(members.values())[at])[0]))
    for recipe in (RECIPE, {"kernel": "thumbnail", "version": 1}):
        assert all(isinstance(made, Ref) for made in derive(node, images, recipe))


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_worker_decodes_every_video_as_this_process_does(
    zoo: tuple[Node, dict[str, bytes]], decoder: VideoDecoder
) -> None:
    node, members = zoo
    videos = [at for at, name in enumerate(members) if Path(name).suffix[1:] in ("webm", "mkv", "mp4", "mov", "avi")]
    assert len(videos) == len(KINDS) + 1
    for at, ref in zip(videos, derive(node, videos, FRAMES | {"decoder": decoder}), strict=True):
        video = Video(list(members.values())[at], decoder=decoder)
        assert np.array_equal(read(node, ref), np.stack(list(video.frames([0, 6, 12, 18, 24]))))
    strips = derive(node, videos, {"kernel": "video_thumbnail", "version": 1, "decoder": decoder})
    assert all(isinstance(made, Ref) for made in strips)


def test_the_name_of_a_video_says_which_decoder_made_it(zoo: tuple[Node, dict[str, bytes]]) -> None:
    node, members = zoo
    at = list(members).index("h264.mp4")
    plain, pyav, decord = (
        derive(node, [at], FRAMES | named)[0] for named in ({}, {"decoder": "pyav"}, {"decoder": "decord"})
    )
    assert plain.name == pyav.name != decord.name
    assert isinstance(plain, Ref) and plain.lineage is not None and plain.lineage.recipe is not None
    assert plain.lineage.recipe["decoder"] == DEFAULT_DECODER == "pyav"


def test_no_secret_of_the_node_is_in_the_environment_of_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DATAPLANE_TOKEN_FILE", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SOMEBODYS_KEY"):
        monkeypatch.setenv(name, "a-secret-of-the-node")
    node = start(tmp_path, {"a.png": encode(noise(0)), "b.mp4": h264()})
    try:
        for number, recipe in ((0, RGB), (1, FRAMES)):
            assert isinstance(derive(node, [number], recipe)[0], Ref)
            (pid,) = node.services.pool.pids()
            pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")[:-1]
            names = {pair.decode().partition("=")[0] for pair in pairs}
            assert b"a-secret" not in b"".join(pairs)
            assert "PATH" in names and names <= {*PASSED_ON, "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
    finally:
        node.stop()


def test_a_worker_has_nothing_of_the_arena_and_is_filtered(tmp_path: Path) -> None:
    node = start(tmp_path, {"a.png": encode(noise(0))})
    try:
        assert isinstance(derive(node, [0], RGB)[0], Ref)
        (pid,) = node.services.pool.pids()
        folder = Path(f"/proc/{pid}")
        held = [str(path.readlink()) for path in (folder / "fd").iterdir()]
        assert "dataplane-" not in (folder / "maps").read_text() and not any("dataplane-" in path for path in held)
        assert not any("decode-result" in path or "a.tar" in path for path in held)
        status = dict(line.split(":\t") for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        expected = ("1", "2") if not why_unavailable() else ("0", "0")
        assert (status["NoNewPrivs"], status["Seccomp"]) == expected
        assert node.stat()["why_workers_unfiltered"] == why_unavailable()
    finally:
        node.stop()


def test_where_the_kernel_has_no_filters_the_node_says_so_once_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_pool, "why_unavailable", lambda: "this is an old kernel")
    node = start(tmp_path, {"a.png": encode(noise(0)), "b.mp4": h264()})
    try:
        assert isinstance(derive(node, [0], RGB)[0], Ref) and isinstance(derive(node, [1], FRAMES)[0], Ref)
        (pid,) = node.services.pool.pids()
        assert "Seccomp:\t0" in Path(f"/proc/{pid}/status").read_text()
        assert caplog.text.count("without a filter of system calls: this is an old kernel") == 1
        assert node.stat()["why_workers_unfiltered"] == "this is an old kernel"
    finally:
        node.stop()


@pytest.mark.usefixtures("hostile")
def test_a_kernel_that_writes_all_the_memory_it_has_changes_no_other_object(tmp_path: Path) -> None:
    node = start(tmp_path, {"a.png": attack("overwrite"), "b.png": encode(noise(0)), "c.png": encode(noise(1))})
    try:
        derive(node, [1, 2], RECIPE)
        before = node.services.segment.bytes.copy()
        (made,) = derive(node, [0], RGB)
        assert isinstance(made, Ref)
        assert read(node, made).tobytes().startswith(str(node.services.segment.capacity).encode() + b"\xee\xee")
        entry = node.services.store.find(made.name)
        assert entry is not None and entry.slab is not None
        after = node.services.segment.bytes.copy()
        start_at, end = entry.slab.offset, entry.slab.offset + entry.slab.nbytes
        assert not np.array_equal(before[start_at:end], after[start_at:end])
        after[start_at:end] = before[start_at:end]
        assert np.array_equal(before, after)
        assert made.meta["checksum"] == content_digest(read(node, made))
    finally:
        node.stop()


@needs_seccomp
@pytest.mark.usefixtures("hostile")
def test_calls_that_decoding_does_not_need_are_refused(tmp_path: Path) -> None:
    target = Path("/tmp/of-a-hostile-worker")
    target.unlink(missing_ok=True)
    nodes = [start(tmp_path, {"a.png": encode(noise(0))})]
    try:
        arena = nodes[0].services.segment.path
        (tmp_path / "b").mkdir()
        nodes.append(start(tmp_path / "b", {"a.png": attack("calls", str(arena))}))
        (made,) = derive(nodes[1], [0], RGB)
        found = json.loads(read(nodes[1], made).tobytes().rstrip(b"\0"))
        assert found.pop("clone3") == "ENOSYS" and found.pop("start a thread") == ""
        assert len(found) == 28 and set(found.values()) == {"EPERM"}, found
        assert arena.exists() and not target.exists()
    finally:
        for node in nodes:
            node.stop()


@pytest.mark.usefixtures("hostile")
def test_a_crash_of_the_decoder_takes_down_its_worker_alone(tmp_path: Path) -> None:
    node = start(tmp_path, {"a.png": attack("crash"), "b.png": encode(noise(0))})
    try:
        derive(node, [1], RECIPE)
        used_bytes = node.services.store.stat()["used_bytes"]
        (bad,) = derive(node, [0], RGB)
        assert isinstance(bad, BadMedia)
        assert "killed the decoder twice: worker" in bad.reason and "code -11" in bad.reason
        assert node.services.store.stat()["used_bytes"] == used_bytes
        assert isinstance(derive(node, [1], RGB)[0], Ref)
    finally:
        node.stop()


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    ("moment", "frame", "reason"),
    [
        ("plan", "[1]", "list instead of an object"),
        ("plan", "{", "no JSON"),
        ("plan", "[" * 100_000, "no JSON"),
        ("plan", '{"need": -1}', "-1 instead of a number"),
        ("plan", '{"need": 2.5}', "2.5 instead of a number"),
        ("result", '{"done": {"shape": [7], "meta": {}, "pixel_bytes": 0, "format": "PNG"}}', "the shape"),
        ("result", '{"done": {"shape": [65536], "meta": [1], "pixel_bytes": 0, "format": "PNG"}}', "TypeError"),
        ("result", '{"done": {"shape": [65536], "meta": {}, "pixel_bytes": -1, "format": "PNG"}}', "-1 instead"),
        ("result", '{"done": 1}', "TypeError"),
    ],
)
def test_a_frame_that_no_worker_sends_ends_the_worker_and_nothing_else(
    tmp_path: Path, moment: str, frame: str, reason: str
) -> None:
    node = start(tmp_path, {"a.png": attack(f"frame instead of a {moment}", frame), "b.png": encode(noise(0))})
    try:
        assert isinstance(derive(node, [1], RGB)[0], Ref)
        workers = [psutil.Process(pid) for pid in node.services.pool.pids()]
        used_bytes = node.services.store.stat()["used_bytes"]
        (bad,) = derive(node, [0], RGB)
        assert isinstance(bad, BadMedia)
        assert "sent a frame that no worker sends" in bad.reason and reason in bad.reason
        assert all(has_ended(worker) for worker in workers)
        assert node.services.store.stat()["used_bytes"] == used_bytes
        assert isinstance(derive(node, [1], RECIPE)[0], Ref)
    finally:
        node.stop()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_of_the_calls_are_those_of_libseccomp(machine: str) -> None:
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("libseccomp is not on this machine")
    resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    column, arch = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}[machine]
    numbers = {name: number[column] for name, number in {**ALLOWED, **CHECKED}.items()}
    assert numbers == {name: resolve(arch, name.encode()) for name in numbers}


def test_the_memory_gives_back_what_a_big_result_took() -> None:
    memory = ResultMemory(KEPT_BYTES + (32 << 20))
    view = map_result_memory(memory.fd, memory.nbytes)
    rows = np.arange(memory.nbytes // 8, dtype=np.int64).view(np.uint8)
    view[:] = rows
    out = np.empty_like(rows)
    assert memory.take(out) == content_digest(rows) and np.array_equal(out, rows)
    assert np.array_equal(view[:KEPT_BYTES], rows[:KEPT_BYTES]) and not view[KEPT_BYTES:].any()


def test_a_worker_cannot_cut_its_result_memory() -> None:
    memory = ResultMemory(1 << 20)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    os.close(memory.fd)
