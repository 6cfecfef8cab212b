"""The files of begun steps: groups with the bytes of their records, so that they outlive the data plane.

Consumes: groups whose records are at the data plane. Produces: an Arrow IPC file, with one row per group; and at
another start the records at the data plane again. A few groups at a time are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from dataplane.client.client import Client
from dataplane.client.put_batches import Durable
from dataplane.client.reader import Reader
from dataplane.core.refs import ArraySpec
from yatt_mm.common.errors import CheckpointError
from yatt_mm.common.manifest import note_written, record_file
from yatt_mm.common.writing import writing
from yatt_mm.protocol.saved_groups import SavedGroup, SavedShare, group_from_json, group_to_json
from yatt_mm.protocol.step_meter import StepMeter

FORMAT = b"yatt_mm.begun.1"
NUM_AT_A_TIME = 32
"""The number of groups whose records are read or stored together."""


class GroupFiles:
    """Writes groups to files, and puts them back."""

    def __init__(self, client: Client, reader: Reader, *, scope: str | None, durable: bool) -> None:
        """`scope`, `durable`: of the records that are put back; see `Client.put`."""
        self._client = client
        self._reader = reader
        self._scope = scope
        self._durable: Durable = "unsynced" if durable else False

    def write(self, path: Path, share: SavedShare) -> None:
        """Write a controller's share of a begun step, and bring it to the disk.

        Raises:
            DataPlaneError: a record cannot be read.
            DiskError: the file cannot be written.
        """
        header = {"has_wrong_rewards": share.has_wrong_rewards, "meter": asdict(share.meter)}
        schema = _SCHEMA.with_metadata({b"format": FORMAT, b"header": json.dumps(header).encode()})
        with writing(path):
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for groups in _portions(share.groups):
                    views = self._reader.resolve([saved.group.ref for saved in groups])
                    columns = [
                        pa.array(map(group_to_json, groups), pa.string()),
                        pa.array([view.tobytes() for view in views], pa.large_binary()),
                    ]
                    writer.write_batch(pa.record_batch(columns, schema=schema))
            note_written(path, record_file(path))

    def put_back(self, path: Path, name: str) -> SavedShare:
        """Store the records of a file at the data plane, under names that begin with `name`, and return the share.

        Raises:
            CheckpointError: it is no such file, or one of another version.
            DataPlaneError: a record cannot be stored.
        """
        groups: list[SavedGroup] = []
        try:
            with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
                metadata = reader.schema.metadata or {}
                if metadata.get(b"format") != FORMAT:
                    raise CheckpointError(f"{path} has format {metadata.get(b'format')!r}; wanted {FORMAT!r}")
                for number in range(reader.num_record_batches):
                    groups += self._put(reader.get_batch(number), name)
        except (OSError, pa.ArrowInvalid) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        header = json.loads(metadata[b"header"])
        return SavedShare(
            groups=tuple(groups),
            has_wrong_rewards=header["has_wrong_rewards"],
            meter=StepMeter(**header["meter"]),
        )

    def _put(self, batch: pa.RecordBatch, name: str) -> Iterator[SavedGroup]:
        texts, records = batch["group"].to_pylist(), batch["record"].to_pylist()
        specs = [
            ArraySpec(name=f"{name}/{json.loads(text)['slot']['position']}", dtype="uint8", shape=(len(record),))
            for text, record in zip(texts, records)
        ]
        refs = self._client.put_many(specs, records, scope=self._scope, durable=self._durable)
        return map(group_from_json, texts, refs)


_SCHEMA = pa.schema([pa.field("group", pa.string(), nullable=False), pa.field("record", pa.large_binary(), False)])


def _portions(groups: Sequence[SavedGroup]) -> Iterator[Sequence[SavedGroup]]:
    return (groups[at : at + NUM_AT_A_TIME] for at in range(0, len(groups), NUM_AT_A_TIME))
