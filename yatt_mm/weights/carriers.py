"""Carriers: choosing how weights go from the training ranks to the engines.

shm: a segment in shared memory. cuda_ipc: memory of a GPU that both roles use. nccl: a broadcast.
"""

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
        """Make the present weights readable for engines; return what they need in addition to the segment's path.

        None if the path is enough. Collective over all training ranks.
        """

    def release(self) -> None:
        """End the last publish and free what it holds.

        Call it after every engine has loaded the weights. With nccl it waits until they have received them.
        """


def resolve_carrier(carrier: Carrier, device: torch.device) -> Carrier:
    """Return the carrier, with "auto" replaced by the one for ranks on this device.

    Raises ValueError if the carrier does not work on this device.
    """
    if carrier == "auto":
        return "cuda_ipc" if device.type == "cuda" else "shm"
    if carrier == "cuda_ipc" and device.type != "cuda":
        raise ValueError(
            f"weights.carrier is cuda_ipc, but the training ranks compute on the {device.type}; set weights.carrier to "
            "shm or auto"
        )
    return carrier


def make_publisher(
    carrier: Carrier, weights: ShardedWeights, path: str, device: torch.device, receivers: Receivers
) -> Publisher:
    """Return the publisher that uses this carrier. Collective over all training ranks.

    `path`: the file for a segment in shared memory; for nccl and cuda_ipc the beginning of the names of files in which
    the ranks and the engines meet, and of that with the index. `receivers`: the engines' processes, for nccl.
    """
    if carrier == "cuda_ipc":
        return DevicePublisher(weights, device, path)
    if carrier == "nccl":
        return StreamPublisher(weights, device, path, receivers)
    return SegmentPublisher(weights, path)
