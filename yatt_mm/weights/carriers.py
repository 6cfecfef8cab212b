"""Which way weights go from training ranks to engines."""

from __future__ import annotations

from typing import Protocol

import torch

from models.weights.export import ShardedWeights
from yatt_mm.protocol.published import Carrier, DeviceSegment, WeightStream
from yatt_mm.weights.device_publisher import DevicePublisher
from yatt_mm.weights.segment_publisher import SegmentPublisher
from yatt_mm.weights.stream_publisher import Receivers, StreamPublisher


class Publisher(Protocol):
    """One training rank's part of publishing."""

    def publish(self, version: int) -> DeviceSegment | WeightStream | None:
        """Make today's weights readable for engines; what they need besides the segment's path. Collective."""

    def release(self) -> None:
        """Every engine has taken what was published."""


def resolve_carrier(carrier: Carrier, device: torch.device) -> Carrier:
    """The carrier itself, or with "auto" the one for ranks on this device. Raises ValueError for one that cannot be."""
    if carrier == "auto":
        return "cuda_ipc" if device.type == "cuda" else "shm"
    if carrier == "cuda_ipc" and device.type != "cuda":
        raise ValueError(
            f"weights.carrier is cuda_ipc and the training ranks compute on the {device.type}; set weights.carrier=shm "
            "or leave it at auto"
        )
    return carrier


def make_publisher(
    carrier: Carrier, weights: ShardedWeights, path: str, device: torch.device, receivers: Receivers
) -> Publisher:
    """For a resolved carrier; `path` is where a segment in shared memory goes. Collective."""
    if carrier == "cuda_ipc":
        return DevicePublisher(weights, device)
    if carrier == "nccl":
        return StreamPublisher(weights, device, receivers)
    return SegmentPublisher(weights, path)
