"""Where engines find a published policy: the message that controllers pass from training ranks to engines. No torch
here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Carrier = Literal["auto", "shm", "cuda_ipc", "nccl"]
"""How weights reach the engines: a segment in shared memory, one in the memory of each GPU that both roles use, or a
broadcast over NCCL (gloo on the CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSegment:
    """A whole model in a GPU's memory, which other processes on the same GPU can map. Its index is in a file of the
    host (`yatt_mm.weights.segment.index_file`)."""

    gpu: str
    """The UUID of the GPU."""
    handle: tuple[bytes, int, int, bytes, int, bytes, bool] = field(repr=False)
    """What CUDA and torch's allocator need to map the memory; opaque here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStream:
    """A whole model that training rank 0 sends to every receiver."""

    store: str
    """The path of the file in which the members meet. Only the run's user can reach it."""
    key: str
    """A key that only this publish uses."""
    num_members: int
    """The sender, and each engine process that holds a model."""
    deadline_s: float
    """The deadline of every wait, in seconds."""
    index: bytes = field(repr=False)
    """The names, dtypes, shapes and offsets, in the form of a segment file's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy that engines may read until the next one is published."""

    version: int
    path: str
    """The segment in shared memory, or, before the first publish, the model's folder. With device segments the name
    from which that of their index's file is made; not used with a stream."""
    devices: tuple[DeviceSegment, ...] = ()
    stream: WeightStream | None = None

    @classmethod
    def of(cls, version: int, path: str, parts: Iterable[DeviceSegment | WeightStream]) -> Published:
        """Return the published policy from the parts that all training ranks gave."""
        streams, devices = [], []
        for part in parts:
            if isinstance(part, WeightStream):
                streams.append(part)
            else:
                devices.append(part)
        return cls(version=version, path=path, devices=tuple(devices), stream=streams[0] if streams else None)

    @property
    def is_lasting(self) -> bool:
        """True where the weights can be read again later. GPU memory and streams are not kept."""
        return not self.devices and self.stream is None

    def update_info(self) -> dict[str, Any]:
        """Return the values in the form that vLLM carries to its workers."""
        return asdict(self)


def segment_on(gpu: str, devices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the published weights that are in the memory of this GPU. Raises ValueError where no training rank has one
    there."""
    for segment in devices:
        if segment["gpu"] == gpu:
            return segment
    raise ValueError(
        f"no training rank published on GPU {gpu}, only on {', '.join(segment['gpu'] for segment in devices)}; CUDA "
        "IPC needs one on each GPU of an engine: set weights.carrier=shm"
    )
