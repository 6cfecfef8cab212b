"""Tests of reading videos: every container and codec that datasets may hold gives frames or a reason."""

from pathlib import Path

import numpy as np
import pytest

from dataplane.media.containers import check_container
from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import DEFAULT_LIMITS, MediaLimits
from dataplane.media.video_headers import largest_frame
from dataplane.media.videos import Video, VideoDecoder
from tests.dataplane.clips import encode_video, h264, moving, sound
from tests.dataplane.shards import encode, noise

DECODERS: list[VideoDecoder] = ["pyav", "decord"]
KINDS = [("VP80", "webm", "WEBM"), ("VP90", "webm", "WEBM"), ("VP80", "mkv", "MKV"), ("mp4v", "mp4", "MP4")]
KINDS += [("vp09", "mp4", "MP4"), ("mp4v", "mov", "MOV"), ("MJPG", "avi", "AVI")]


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("codec", "extension", "container"), KINDS)
def test_frames_come_back_in_order_from_every_container(
    tmp_path: Path, codec: str, extension: str, container: str, decoder: VideoDecoder
) -> None:
    frames = moving()
    video = Video(encode_video(tmp_path / f"a.{extension}", codec, frames), decoder=decoder)
    assert (video.format, video.num_frames, video.fps, video.height, video.width) == (container, 25, 10.0, 48, 64)
    indices = [0, 3, 4, 11, 24]
    found = np.stack(list(video.frames(indices)))
    assert found.shape == (5, 48, 64, 3)
    distances = [[np.abs(one.astype(int) - other).mean() for other in frames.astype(int)] for one in found]
    assert np.argmin(distances, axis=1).tolist() == indices


@pytest.mark.parametrize("decoder", DECODERS)
def test_h264_with_frames_out_of_order_and_sound_gives_the_frames_of_a_plain_reading(decoder: VideoDecoder) -> None:
    video = Video(h264(), ("MP4",), decoder=decoder)
    every = np.stack(list(video.frames(range(25))))
    assert (video.num_frames, video.fps, every.shape) == (25, 10.0, (25, 48, 64, 3))
    for indices in ([24], [5, 17], [11, 12, 13], [0, 24], [7, 7, 8]):
        assert np.array_equal(np.stack(list(Video(h264(), decoder=decoder).frames(indices))), every[indices])
        assert np.array_equal(np.stack(list(video.frames(indices))), every[indices])


def refuse(data: bytes, reason: str, formats: tuple[str, ...] = (), limits: MediaLimits = DEFAULT_LIMITS) -> None:
    for decoder in DECODERS:
        with pytest.raises(UndecodableError, match=reason):
            video = Video(data, formats, limits, decoder)
            list(video.frames(range(video.num_frames)))


@pytest.mark.parametrize(("codec", "extension", "container"), KINDS)
def test_a_video_that_ends_early_is_noticed_wherever_it_ends(
    tmp_path: Path, codec: str, extension: str, container: str
) -> None:
    data = encode_video(tmp_path / f"a.{extension}", codec, moving())
    for end in (*range(12, len(data), max(1, len(data) // 23)), len(data) - 1):
        refuse(data[:end], "truncated|corrupt|cannot open")


def test_a_h264_video_that_ends_early_is_noticed() -> None:
    for end in range(12, len(h264()), 97):
        refuse(h264()[:end], "truncated|corrupt|cannot open")


def test_what_is_no_video_gets_a_reason(tmp_path: Path) -> None:
    refuse(b"", "empty: 0 bytes")
    refuse(encode(noise(0)), "not a video of a known container")
    refuse(b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "not a video of a known container")
    refuse(b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video of a known container")
    refuse(sound(), "no video stream")
    refuse(h264(), "mislabelled: named as WEBM, holds MP4", ("WEBM",))
    refuse(h264(), "(25|more than 24) frames; at most 24", limits=MediaLimits(max_video_frames=24))
    refuse(h264(), "frames of 64x48 = 3072 pixels; at most 3000", limits=MediaLimits(max_image_pixels=3000))


@pytest.mark.parametrize(("codec", "extension", "container"), [*KINDS, ("h264", "", "MP4")])
def test_frames_too_big_are_refused_from_the_header_before_any_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, extension: str, container: str
) -> None:
    data = encode_video(tmp_path / f"a.{extension}", codec, moving()) if extension else h264()
    assert largest_frame(data, container) == (64, 48)

    def opened(decoder: VideoDecoder) -> None:
        raise AssertionError("a decoder saw it")

    monkeypatch.setattr("dataplane.media.videos.load_decoder", opened)
    refuse(data, "decompression bomb: frames of 64x48 = 3072 pixels", limits=MediaLimits(max_image_pixels=3071))


@pytest.mark.parametrize("data", [b"", bytes(100), b"\xff" * 100, sound()])
@pytest.mark.parametrize("container", ["MP4", "MOV", "MKV", "WEBM", "AVI"])
def test_headers_that_say_nothing_announce_no_frames(data: bytes, container: str) -> None:
    assert largest_frame(data, container) == (0, 0)


def test_a_header_without_frames_is_no_video(tmp_path: Path) -> None:
    webm = encode_video(tmp_path / "a.webm", "VP80", moving(1))
    at = webm.index(b"\x1f\x43\xb6\x75")  # the first cluster
    header = bytearray(webm[:at])
    segment = header.index(b"\x18\x53\x80\x67") + 4
    header[segment : segment + 8] = b"\x01" + (at - segment - 8).to_bytes(7, "big")
    assert check_container(bytes(header)) == "WEBM"
    refuse(bytes(header), "cannot open this WEBM|corrupt")


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes_give_frames_or_a_reason(seed: int, decoder: VideoDecoder) -> None:
    """Test the decoder alone on damaged bytes. It may also crash, which is handled by the pool."""
    rng = np.random.default_rng(seed)
    data = bytearray(h264())
    for at in rng.integers(48, 3000, 3):  # the coded frames
        data[at] ^= int(rng.integers(1, 256))
    try:
        found = list(Video(bytes(data), decoder=decoder).frames(range(25)))
    except UndecodableError as error:
        assert any(word in str(error) for word in ("corrupt", "cannot open", "truncated"))
    else:
        assert len(found) == 25
