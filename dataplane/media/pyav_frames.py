"""Reads the frames of a video with PyAV, which brings a current FFmpeg. Only worker processes import this file.

The packets of the video track are read once and kept, and they are the index of the frames. A frame is decoded from the
key frame before it, and is recognised by its packet. The demuxer gets the bytes and the name of their format, and it
can open nothing else. One thread decodes: there is a worker for every core.
"""

import bisect
import importlib
import io
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import av
import numpy as np
from av.error import FFmpegError

from dataplane.media.kinds import UndecodableError
from dataplane.media.limits import MediaLimits

CODECS = (
    *("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "msmpeg4v1", "msmpeg4v2", "msmpeg4", "mjpeg"),
    *("mpeg1video", "mpeg2video", "h263", "flv", "theora", "prores", "vc1", "wmv1", "wmv2", "wmv3", "dvvideo", "ffv1"),
)
"""FFmpeg's names of the decoders that may run. It has hundreds more, and a hostile file could use a fault of any."""
_DEMUXERS = {"MP4": "mov", "MOV": "mov", "WEBM": "matroska", "MKV": "matroska", "AVI": "avi"}
_READ_BYTES = 1 << 18
_VP8_SHOWN = 0x10
"""The bit in the first byte of a VP8 packet that says that its frame is shown."""

av.logging.set_level(None)
for _part in pkgutil.walk_packages(av.__path__, "av."):  # it imports some when a file needs them; workers cannot then
    if not _part.name.endswith("__main__"):
        importlib.import_module(_part.name)


class PyavFrames:
    """The frames of one video. The constructor and `frames` raise UndecodableError."""

    def __init__(self, data: bytes, container: str, limits: MediaLimits) -> None:
        self._format = container
        self._packets: list[Any] = []
        try:
            self._read_packets(data, limits)
        except MemoryError:
            raise  # this error is not about the bytes
        except FFmpegError as error:
            raise UndecodableError(f"cannot open this {container}: {_words(error)}") from error
        shown = [at for at, packet in enumerate(self._packets) if self._is_shown(packet)]
        self.num_frames = len(shown)
        """The number of frames that the file has packets for."""
        self._times = [packet.pts for packet in self._packets]
        times = [self._times[at] for at in shown]
        is_reordered = container == "AVI" and self._codec.has_b_frames > 0  # AVI has no times, FFmpeg guesses them
        self._has_times = not is_reordered and None not in times and len(set(times)) == len(times)
        """False if the file does not say in which order frames are shown: then they are counted from the first one."""
        self._packet_of = sorted(shown, key=self._times.__getitem__) if self._has_times else shown
        """The number of the packet of each frame, in the order in which the frames are shown."""
        self._index_of = {packet: index for index, packet in enumerate(self._packet_of)}
        self._keys = [at for at in shown if self._packets[at].is_keyframe]
        for at, packet in enumerate(self._packets):
            packet.pts = packet.dts = at  # a decoded frame has the time of its packet
        self._index, self._num_fed = -1, 0
        """The index of the last decoded frame, and the number of packets that the decoder has got."""
        self._frame: Any = None
        self._decoded = self._decode(0)

    def frames(self, indices: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the frame [height, width, 3] uint8 of each index. Ascending indices are the fastest."""
        for index in indices:
            try:
                yield _pixels(self._seek(index))
            except MemoryError:
                raise
            except FFmpegError as error:
                raise UndecodableError(f"truncated or corrupt {self._format}: {_words(error)}") from error

    def _read_packets(self, data: bytes, limits: MediaLimits) -> None:
        options = {"codec_whitelist": ",".join(CODECS), "max_pixels": str(limits.max_image_pixels), "threads": "1"}
        with av.open(
            io.BytesIO(data),
            mode="r",
            format=_DEMUXERS[self._format],
            options=options,
            container_options={"codec_whitelist": options["codec_whitelist"], "enable_drefs": "0"},
            buffer_size=_READ_BYTES,
            io_open=_refuse_to_open,
        ) as container:
            stream = container.streams.best("video")
            if stream is None:
                raise UndecodableError(f"cannot open this {self._format}: it has no video stream")
            self._codec: Any = stream.codec_context  # PyAV's type for it knows no video
            if self._codec is None or self._codec.name not in CODECS:
                found = "an unknown codec" if self._codec is None else f"the codec {self._codec.name}"
                raise UndecodableError(f"cannot open this {self._format}: {found} is not one of {', '.join(CODECS)}")
            self._codec.options = options
            self._codec.thread_count = 1
            self.fps = float(stream.average_rate or 0)
            """The frames per second; the average, if the rate is not steady."""
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    raise UndecodableError(f"truncated or corrupt {self._format}: packet {len(self._packets)} is cut")
                if packet.size:
                    self._packets.append(packet)
                if len(self._packets) > limits.max_video_frames:
                    most = limits.max_video_frames
                    raise UndecodableError(f"more than {most} frames; at most {most} are looked at")

    def _is_shown(self, packet: Any) -> bool:
        """Return False for a packet that only helps to decode others: outside of the edit, or a hidden VP8 frame."""
        return not packet.is_discard and (self._codec.name != "vp8" or bool(memoryview(packet)[0] & _VP8_SHOWN))

    def _seek(self, index: int) -> Any:
        """Return the decoded frame of an index."""
        if index == self._index:
            return self._frame
        if index >= self.num_frames:
            raise UndecodableError(f"truncated or corrupt {self._format}: it has {self.num_frames} frames, not {index}")
        wanted = self._packet_of[index]
        start = self._key_before(wanted)
        if index < self._index or start >= self._num_fed:
            self._restart(start)
        for frame in self._decoded:
            found = self._index_of.get(frame.pts) if self._has_times else self._index + 1
            if found is None:
                continue
            self._index, self._frame = found, frame
            if found == index:
                return frame
            if found > index:
                break
        raise UndecodableError(
            f"truncated or corrupt {self._format}: frame {index} of {self.num_frames} cannot be decoded"
        )

    def _key_before(self, wanted: int) -> int:
        """Return the number of the packet with which decoding begins, so that the wanted one can be decoded."""
        if not self._has_times:
            return 0
        for key in reversed(self._keys[: bisect.bisect_right(self._keys, wanted)]):
            if self._times[key] <= self._times[wanted]:
                return key
        return 0

    def _restart(self, packet: int) -> None:
        if self._codec.is_open:
            self._codec.flush_buffers()
        self._index, self._num_fed, self._frame = -1, packet, None
        self._decoded = self._decode(packet)

    def _decode(self, start: int) -> Iterator[Any]:
        for packet in self._packets[start:]:
            self._num_fed += 1
            yield from self._codec.decode(packet)
        yield from self._codec.decode(None)


def _pixels(frame: Any) -> np.ndarray:
    """Return a frame as RGB, turned as the file says that it is to be shown."""
    pixels = frame.to_ndarray(format="rgb24", threads=1)
    turns = round(frame.rotation / 90) % 4
    return np.rot90(pixels, turns) if turns else pixels


def _refuse_to_open(url: str, flags: int, options: Any) -> NoReturn:
    raise PermissionError(f"a video may not name other files: {url[:80]!r}")


def _words(error: FFmpegError) -> str:
    return f"{type(error).__name__}: {(error.strerror or '')[:120]}"
