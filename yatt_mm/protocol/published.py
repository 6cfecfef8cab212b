"""Where engines find a published policy: what controllers pass from training ranks to engines. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Carrier = Literal["auto", "shm", "cuda_ipc", "nccl"]
"""How weights reach the engines: a segment in shared memory, one in the memory of each GPU that both roles use, or a
broadcast over NCCL (gloo on the CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSegment:
    """A whole model in a GPU's memory, which other processes on the same GPU may map."""

    gpu: str
    """UUID of the GPU."""
    index: bytes = field(repr=False)
    """Names, dtypes, shapes and places, as in a segment's file."""
    handle: tuple[bytes, int, int, bytes, int, bytes, bool] = field(repr=False)
    """What CUDA and torch's allocator need to map the memory: opaque."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStream:
    """A whole model on its way from training rank 0 to everybody who receives it."""

    host: str
    port: int
    """Of the store in which the members meet."""
    key: str
    """Of this publish alone."""
    num_members: int
    """The sender, and each process of an engine that holds a model."""
    deadline_s: float
    """Of every wait."""
    index: bytes = field(repr=False)
    """Names, dtypes, shapes and places, as in a segment's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A policy that engines may read until the next one is published."""

    version: int
    path: str
    """The segment in shared memory, where there is nothing else; or the model's folder, before the first publish."""
    devices: tuple[DeviceSegment, ...] = ()
    stream: WeightStream | None = None

    @classmethod
    def of(cls, version: int, path: str, parts: Iterable[DeviceSegment | WeightStream]) -> Published:
        """From what all training ranks gave back."""
        streams, devices = [], []
        for part in parts:
            if isinstance(part, WeightStream):
                streams.append(part)
            else:
                devices.append(part)
        return cls(version=version, path=path, devices=tuple(devices), stream=streams[0] if streams else None)

    @property
    def is_lasting(self) -> bool:
        """True where the weights can be read again later: nobody keeps those in GPU memory and those that were sent."""
        return not self.devices and self.stream is None

    def update_info(self) -> dict[str, Any]:
        """As vLLM carries it to its workers."""
        return asdict(self)


def segment_on(gpu: str, devices: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The published segment that lies on a GPU. Raises ValueError where no training rank has one there."""
    for segment in devices:
        if segment["gpu"] == gpu:
            return segment
    raise ValueError(
        f"no training rank published on GPU {gpu}, only on {', '.join(segment['gpu'] for segment in devices)}; CUDA "
        "IPC needs one on each GPU of an engine: set weights.carrier=shm"
    )
