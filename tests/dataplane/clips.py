"""Small videos for tests: some are made with OpenCV, and two that OpenCV cannot make (H.264 with sound, sound alone)
are files."""

from pathlib import Path

import cv2  # before decord is: each brings a libvpx, and the first one loaded serves both
import numpy as np

DATA = Path(__file__).parent / "data"


def moving(num_frames: int = 25, height: int = 48, width: int = 64) -> np.ndarray:
    """Return [T, height, width, 3] frames of a smooth moving picture; each frame is brighter than the one before."""
    rows, columns = np.mgrid[0:height, 0:width]
    frames = []
    for at in range(num_frames):
        bands = [(columns * 2 + at * 3) % 256, (rows * 3 + at * 2) % 256, np.full_like(rows, 9 * at % 256)]
        frames.append(np.stack(bands, axis=-1).astype(np.uint8))
    return np.stack(frames)


def encode_video(path: Path, codec: str, frames: np.ndarray, fps: float = 10.0) -> bytes:
    """Return the bytes of a video file. The container follows from the path's extension."""
    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), fps, (width, height))
    assert writer.isOpened(), codec
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[:, :, ::-1]))
    writer.release()
    return path.read_bytes()


def h264() -> bytes:
    """Return an MP4 of 25 frames of 64x48 at 10 a second: x264 with B-frames, a key frame every 12 frames, and an AAC
    track."""
    return (DATA / "h264.mp4").read_bytes()


def sound() -> bytes:
    """Return an MP4 that has only an AAC track."""
    return (DATA / "audio.mp4").read_bytes()
