"""WebDataset tars as shards: members that share a key are a row. `member_fields.py` reads those that hold fields."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.core.digests import SOURCE_HEX, content_digest
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.columns import ColumnOptions
from dataplane.datasets.formats.json_safe import checked_fields
from dataplane.datasets.formats.media_values import without_data
from dataplane.datasets.formats.member_fields import JSON, holds_fields, read_member
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import (
    MAX_FIELDS_BYTES,
    MAX_MEDIUM_BYTES,
    Flaw,
    Medium,
    MediumLocation,
    Row,
)
from dataplane.datasets.formats.tar_index import TarIndex, TarMember, index_tar
from dataplane.datasets.formats.tar_index_files import load_index, save_index
from dataplane.media.kinds import MEDIA_FORMATS, kind_of

DIGEST_BYTES = SOURCE_HEX // 2


class TarShard:
    """One tar as a shard. Thread-safe. Raises DatasetError if it is not an uncompressed tar."""

    columns = None

    def __init__(self, file: RangeFile, caches: Caches, options: ColumnOptions, index_dir: Path | None = None) -> None:
        """`options`: `drop` names fields that are not read. `index_dir`: where indices are kept; None keeps none."""
        self._file = file
        self._options = options
        self._caches = caches
        self._index = _index_of(file, index_dir)
        self._digests = np.zeros((self._index.num_members, DIGEST_BYTES), np.uint8)  # all zero means not known yet
        self.flaws: Sequence[Flaw] = self._index.flaws

    @property
    def num_samples(self) -> int:
        """The number of groups of members that share a key."""
        return self._index.num_samples

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers."""
        self._file.check_unchanged()
        return [self._row(number) for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the place of the medium whose bytes begin at `offset`."""
        member = self._index.find(offset)
        formats = formats_of(member) if member else None
        if member is None or formats is None or part or member.nbytes != nbytes:
            return None
        return MediumLocation(self._file, offset, nbytes, member.key, formats)

    def _row(self, number: int) -> Row:
        members = self._index.sample(number)
        fields: dict[str, Any] = {}
        media, flaws = [], []
        for at, member in members:
            formats = formats_of(member)
            if formats is not None:
                media.append(Medium(member.offset, "", member.nbytes, self._digest(at, member), kind_of(formats)))
            elif holds_fields(member.extension):
                try:
                    more = self._fields_of(member)
                    fields = fields | more if member.extension == JSON else more | fields
                except ValueError as error:
                    flaws.append(Flaw(member.offset, member.key, f"{member.path} {error}"))
        key = members[0][1].key
        kept = {name: value for name, value in fields.items() if name not in self._options.drop}
        fields, reason = checked_fields(without_data(kept))
        if reason:
            flaws.append(Flaw(members[0][1].offset, key, reason))
        return Row(key, fields, tuple(media), tuple(flaws))

    def _fields_of(self, member: TarMember) -> dict[str, Any]:
        if member.nbytes > MAX_FIELDS_BYTES:
            raise ValueError(f"has {member.nbytes} bytes; wanted at most {MAX_FIELDS_BYTES} of fields")
        return read_member(member.extension, self._file.read(member.offset, member.nbytes))

    def _digest(self, at: int, member: TarMember) -> str:
        known = self._digests[at].tobytes()
        if any(known):
            return known.hex()
        data = self._file.read(member.offset, member.nbytes)
        digest = content_digest(data)
        if len(data) == member.nbytes:  # otherwise the shard was cut meanwhile
            self._caches.encoded.put(digest, data, len(data))
        self._digests[at] = np.frombuffer(bytes.fromhex(digest), np.uint8)
        return digest


def formats_of(member: TarMember) -> tuple[str, ...] | None:
    """Return the formats that a media member may have; None for members that are not media."""
    return MEDIA_FORMATS.get(member.extension.rpartition(".")[2])


def _index_of(file: RangeFile, folder: Path | None) -> TarIndex:
    """Return the index of a tar, from a folder of indices if it is there."""
    if folder is None:
        return index_tar(file, _refuse)
    index = load_index(folder, file)
    if index is None:
        index = index_tar(file, _refuse)
        save_index(folder, file, index)
    return index


def _refuse(member: TarMember) -> str:
    if member.nbytes <= MAX_MEDIUM_BYTES or formats_of(member) is None:
        return ""
    return f"{member.nbytes} encoded bytes; wanted at most {MAX_MEDIUM_BYTES}"
