"""Publishing from many training ranks into one segment of each host.

Where all ranks share a host, each copies its own parts straight into the segment: no collective, no gathered copy,
and every core takes part. Where they do not, the full tensors are gathered everywhere and one rank of each host
writes them.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from models.weights.export import ShardedWeights
from yatt_mm.weights.checked_copy import copy_finite
from yatt_mm.weights.rank_agreement import gather, together
from yatt_mm.weights.segment_writer import SegmentWriter


class SegmentPublisher:
    """One training rank's part of publishing; every method is collective over all ranks."""

    def __init__(self, weights: ShardedWeights, path: str | Path) -> None:
        """Makes the segment at `path`, at its full size."""
        self._weights = weights
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        hosts = gather(_host(self._path.parent))
        self._is_first_of_host = hosts.index(hosts[dist.get_rank()]) == dist.get_rank()
        self.is_shared = len(set(hosts)) == 1
        """True where every rank can reach the same segment."""
        metas = weights.metadata()
        if self._is_first_of_host:
            together(lambda: SegmentWriter.prepare(self._path, metas))
        else:
            together(lambda: None)
        self._writer = together(lambda: SegmentWriter(self._path, metas))

    def publish(self, version: int) -> None:
        """Write today's weights as a policy version; afterwards engines may read it on every host.

        Raises on every rank where one fails; the segment then stays unsealed. NonFiniteWeightsError names a tensor.
        """
        if self._is_first_of_host:
            self._writer.begin()
        if self.is_shared:
            dist.barrier()  # nobody writes before the segment says so
            together(self._write_own_parts)
        else:
            together(self._write_everything)
        if self._is_first_of_host:
            self._writer.seal(version)
        dist.barrier()

    def release(self) -> None:
        """Nothing: the segment stays, for the next publish and for engines that start later."""

    def _write_own_parts(self) -> None:
        for name, source, place in self._weights.own_parts(self._writer.places):
            copy_finite(name, source, place)

    def _write_everything(self) -> None:
        error: Exception | None = None
        for name, tensor in self._weights:
            if self._is_first_of_host and error is None:
                try:
                    copy_finite(name, tensor, self._writer.places[name])
                except FloatingPointError as found:
                    error = found  # the other ranks still need this one to iterate to the end
        if error:
            raise error


def _host(folder: Path) -> tuple[str, int]:
    """Equal for processes that see the same files in `folder`: the machine, and what is mounted there."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, folder.stat().st_dev
