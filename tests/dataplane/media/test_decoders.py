"""Tests that PyAV gives the frames that decord gives, for videos of many kinds, and what PyAV may read and decode."""

import io
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import MediaLimits
from dataplane.media.pyav_frames import CODECS
from dataplane.media.videos import Video
from tests.dataplane.clips import encode_video, moving

NUM_FRAMES = 40


def made(
    container: str,
    codec: str,
    *,
    size: tuple[int, int] = (64, 64),
    pixels: str = "yuv420p",
    times: Callable[[int], int] | None = None,
    **options: str,
) -> bytes:
    """Return a video of `NUM_FRAMES` frames at 10 a second, or with these times in milliseconds."""
    file, (height, width) = io.BytesIO(), size
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        stream.options = {"g": "12", **{name.replace("_", "-"): value for name, value in options.items()}}
        if times:
            stream.codec_context.time_base = Fraction(1, 1000)
        for at, frame in enumerate(moving(NUM_FRAMES, height, width)):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if times:
                picture.pts, picture.time_base = times(at), Fraction(1, 1000)
            output.mux(stream.encode(picture))
        output.mux(stream.encode(None))
    return file.getvalue()


def made_apart(container: str, codec: str) -> bytes:
    """Return what `made` returns, from a process of its own. SVT-AV1 gives a thread that encodes, when root runs it,
    the highest real-time priority: pytest and all that it starts later would then starve other processes."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(made, container, codec).result()


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Return an MP4 that says that its pictures are shown turned, by the four numbers of its display matrix."""
    at = data.index(b"tkhd") + 44
    a, b, c, d = (value << 16 for value in matrix)
    numbers = (a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return data[:at] + b"".join(value.to_bytes(4, "big", signed=True) for value in numbers) + data[at + 36 :]


def uneven(at: int) -> int:
    return at * 90 + at * at % 7 * 11


SAME: dict[str, Callable[[], bytes]] = {
    "H.264, B-frames, MP4": lambda: made("mp4", "libx264", bf="3"),
    "H.264, B-frames, MKV": lambda: made("matroska", "libx264", bf="3"),
    "H.264, B-frames, AVI": lambda: made("avi", "libx264", bf="3"),
    "H.264, open groups": lambda: made("matroska", "libx264", bf="3", x264_params="open-gop=1:scenecut=0"),
    "H.264, uneven rate, MP4": lambda: made("mp4", "libx264", bf="3", times=uneven),
    "H.264, uneven rate, MKV": lambda: made("matroska", "libx264", bf="3", times=uneven),
    "H.264, odd size, 4:4:4": lambda: made("mp4", "libx264", size=(47, 63), pixels="yuv444p"),
    "H.264, 4:2:2, cropped": lambda: made("mov", "libx264", size=(50, 70), pixels="yuv422p"),
    "H.264, full range": lambda: made("mp4", "libx264", pixels="yuvj420p"),
    "H.265, B-frames": lambda: made("mp4", "libx265", x265_params="log-level=none"),
    "H.265, open groups": lambda: made("matroska", "libx265", x265_params="log-level=none:keyint=12:open-gop=1"),
    "VP8": lambda: made("webm", "libvpx"),
    "VP9": lambda: made("webm", "libvpx-vp9", lag_in_frames="16", auto_alt_ref="1"),
    "MPEG-4, B-frames, AVI": lambda: made("avi", "mpeg4", bf="2"),
    "MPEG-4, B-frames, MP4": lambda: made("mp4", "mpeg4", bf="2"),
    "MPEG-2, B-frames": lambda: made("matroska", "mpeg2video", bf="2", strict="-1"),
    "Motion JPEG": lambda: made("avi", "mjpeg", pixels="yuvj420p"),
    "ProRes, 10 bits, 4:2:2": lambda: made("mov", "prores_ks", pixels="yuv422p10le"),
    "turned by 90 degrees": lambda: turned(made("mp4", "libx264", size=(50, 70)), (0, 1, -1, 0)),
    "turned by 180 degrees": lambda: turned(made("mp4", "libx264", size=(50, 70)), (-1, 0, 0, -1)),
    "turned by 270 degrees": lambda: turned(made("mp4", "libx264", size=(50, 70)), (0, -1, 1, 0)),
}


def frames(video: Video, indices: list[int]) -> np.ndarray:
    return np.stack(list(video.frames(indices)))


@pytest.mark.parametrize("kind", SAME)
def test_pyav_gives_the_frames_and_the_rate_that_decord_gives_bit_for_bit(kind: str) -> None:
    data = SAME[kind]()
    pyav, decord = Video(data), Video(data, decoder="decord")
    every = frames(decord, list(range(NUM_FRAMES)))
    assert (pyav.num_frames, pyav.fps) == (decord.num_frames, decord.fps) == (NUM_FRAMES, pytest.approx(10, rel=0.2))
    assert np.array_equal(frames(pyav, list(range(NUM_FRAMES))), every)
    random = np.random.default_rng(0)
    for length in (1, 2, 5, 9):
        wanted = random.integers(0, NUM_FRAMES, length).tolist()
        for indices in (wanted, sorted(wanted)):
            assert np.array_equal(frames(Video(data), indices), every[indices])
            assert np.array_equal(frames(pyav, indices), every[indices])


@pytest.mark.parametrize(
    ("options", "most"),
    [({"codec": "libx264", "container": "mp4", "pixels": "yuv420p10le"}, 1.5), ({"size": (47, 63)}, 1.5)],
)
def test_frames_whose_colours_are_interpolated_differ_a_little(options: dict[str, Any], most: float) -> None:
    """FFmpeg 4.1 and 8 place the colours of 10-bit and of odd-sized 4:2:0 frames between pixels in different ways."""
    data = made(**({"codec": "libvpx-vp9", "container": "webm"} | options))
    pyav, decord = (frames(Video(data, decoder=name), [0, 7, 39]).astype(int) for name in ("pyav", "decord"))
    assert pyav.shape == decord.shape and 0 < np.abs(pyav - decord).mean() < most


@pytest.mark.parametrize("container", ["mp4", "webm"])
def test_av1_is_decoded(container: str) -> None:
    video = Video(made_apart(container, "libsvtav1"))
    distances = np.abs(frames(video, [0, 12, 39]).astype(int)[:, None] - moving(NUM_FRAMES, 64, 64).astype(int))
    assert distances.mean(axis=(2, 3, 4)).argmin(axis=1).tolist() == [0, 12, 39]


def test_few_frames_of_a_long_video_are_decoded_from_the_key_frame_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    video = Video(made("mp4", "libx264", bf="3", x264_params="keyint=10:min-keyint=10:scenecut=0"))
    reader: Any = video._reader
    list(video.frames([25]))
    assert reader._num_fed < 40
    fed = []
    decode = reader._decode
    monkeypatch.setattr(reader, "_decode", lambda start: fed.append(start) or decode(start))
    list(video.frames([3, 35, 36]))
    assert fed == [0, 30]


def test_a_codec_that_is_not_in_the_list_is_refused_by_its_name(tmp_path: Path) -> None:
    data = encode_video(tmp_path / "a.avi", "HFYU", moving())
    assert "huffyuv" not in CODECS
    with pytest.raises(UndecodableError, match=r"cannot open this AVI: .*huffyuv"):
        Video(data)


def test_a_decoder_refuses_frames_that_are_bigger_than_their_container_says() -> None:
    small, big = made("matroska", "libx264"), made("matroska", "libx264", size=(256, 256))
    at = big.index(b"\xb0\x82\x01\x00\xba\x82\x01\x00")
    forged = big[:at] + b"\xb0\x82\x00\x40\xba\x82\x00\x40" + big[at + 8 :]
    limits = MediaLimits(max_image_pixels=64 * 64)
    assert Video(small, (), limits).num_frames == NUM_FRAMES
    with pytest.raises(
        UndecodableError, match=r"truncated or corrupt MKV: (ValueError|ArgumentError|InvalidDataError)"
    ):
        Video(forged, (), limits)
