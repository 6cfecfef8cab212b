"""Publishing through shared memory: the training ranks write one segment on each host.

If every host has ranks that together hold a whole model, these copy their own parts directly into the segment: nothing
is gathered, and every core takes part. Otherwise the full tensors are gathered on every rank, and one rank of each host
writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from models.weights.export import ShardedWeights
from yatt_mm.weights.checked_copy import copy_finite
from yatt_mm.weights.rank_agreement import fail_together, gather
from yatt_mm.weights.segment_writer import SegmentWriter


class SegmentPublisher:
    """One training rank's part of publishing through shared memory; every method is collective over all ranks."""

    def __init__(self, weights: ShardedWeights, path: str | Path) -> None:
        """Make the segment at `path`, at its full size."""
        self._weights = weights
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        rank, there = dist.get_rank(), gather((_host(self._path.parent), weights.ranks))
        hosts = [host for host, _ in there]
        self._is_first_of_host = hosts.index(hosts[rank]) == rank
        whole = {host: _models_on(host, there) for host in hosts}
        self.is_gathered = not all(whole.values())
        """True if some host holds no whole model."""
        self._models = whole[hosts[rank]]
        """The whole models on this rank's host, each as its ranks."""
        metas = weights.metadata()
        if self._is_first_of_host:
            fail_together(lambda: SegmentWriter.prepare(self._path, metas))
        else:
            fail_together(lambda: None)
        self._writer = fail_together(lambda: SegmentWriter(self._path, metas))

    def publish(self, version: int) -> None:
        """Write the present weights as a policy version. Afterwards engines on every host may read it.

        If one rank fails, all ranks raise: NonFiniteWeightsError (or its own error) on that rank, PublishError on
        others. The segment then stays unsealed, so no engine can read it.
        """
        if self._is_first_of_host:
            self._writer.begin()
        if self.is_gathered:
            fail_together(self._write_everything)
        else:
            dist.barrier()  # no rank writes before the header says that the segment is being written
            fail_together(self._write_own_parts)
        if self._is_first_of_host:
            self._writer.seal(version)
        dist.barrier()

    def release(self) -> None:
        """Do nothing: the segment stays, for the next publish and for engines that start later."""

    def _write_own_parts(self) -> None:
        """Copy the parts that this rank holds into the segment of its host, if the rest of its model is there too."""
        ranks, models = self._weights.ranks, self._models
        if ranks in models:
            for name, source, place in self._weights.own_parts(self._writer.places, models.index(ranks), len(models)):
                copy_finite(name, source, place)

    def _write_everything(self) -> None:
        """Gather every full tensor; the first rank of each host copies it into the host's segment."""
        error: Exception | None = None
        for name, tensor in self._weights:
            if self._is_first_of_host and error is None:
                try:
                    copy_finite(name, tensor, self._writer.places[name])
                except FloatingPointError as found:
                    error = found  # raised later: gathering needs every rank to iterate to the end
        if error:
            raise error


def _models_on(
    host: tuple[str, int], there: Sequence[tuple[tuple[str, int], tuple[int, ...]]]
) -> list[tuple[int, ...]]:
    """Return the models that ranks of one host hold whole, each as its ranks. `there`: [rank] its host, and the ranks
    of its model."""
    return sorted({ranks for _, ranks in there if all(there[rank][0] == host for rank in ranks)})


def _host(folder: Path) -> tuple[str, int]:
    """Return the host's boot id and the number of the file system that holds `folder`: equal for processes that see the
    same files in it."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot_id, folder.stat().st_dev
