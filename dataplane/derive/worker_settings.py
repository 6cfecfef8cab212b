"""What a node tells a decode worker when it starts it: the arguments of `worker_main.py`, as one JSON text."""

import json
from dataclasses import asdict, dataclass

from dataplane.media.limits import MediaLimits
from dataplane.media.videos import VideoDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of one worker process."""

    socket_fd: int
    result_fd: int
    result_bytes: int
    decoder: VideoDecoder | None
    """The library of videos that is imported at the start. None for a worker that has seen no video yet."""
    is_filtered: bool
    """True if the worker gives up the calls that decoding does not need; then it fails if the system refuses that."""
    limits: MediaLimits

    def to_json(self) -> str:
        """Return the settings as a text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "WorkerSettings":
        """Return the settings of a text that `to_json` made."""
        values = json.loads(text)
        return cls(**(values | {"limits": MediaLimits(**values["limits"])}))
