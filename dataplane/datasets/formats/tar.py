"""WebDataset tars as shards: members that share a key are a row. A parser reads the headers (`tar_index.py`) and the
members that hold fields (`member_fields.py`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.core.digests import SOURCE_HEX, content_digest
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.columns import ColumnOptions
from dataplane.datasets.formats.json_safe import checked_fields
from dataplane.datasets.formats.member_fields import JSON, holds_fields
from dataplane.datasets.formats.parsed_rows import ReceivedRow, cost_of, rows_of
from dataplane.datasets.formats.parser import READING, Parser, Reply, ask, opening
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import MAX_FIELDS_BYTES, Flaw, Medium, MediumLocation, Row
from dataplane.datasets.formats.tar_index_files import load_index, save_index
from dataplane.datasets.formats.tar_members import TarIndex, TarMember, formats_of, index_of
from dataplane.media.kinds import kind_of

DIGEST_BYTES = SOURCE_HEX // 2


class TarShard:
    """One tar as a shard. Thread-safe. Raises DatasetError if it is not an uncompressed tar."""

    columns = None

    def __init__(
        self, file: RangeFile, options: ColumnOptions, caches: Caches, parser: Parser, index_dir: Path | None = None
    ) -> None:
        """`options`: `drop` names fields that are not read. `index_dir`: where indices are kept; None keeps none."""
        self._file = file
        self._options = options
        self._caches = caches
        self._parser = parser
        self._index = _index_of(file, parser, index_dir)
        self._digests = np.zeros((self._index.num_members, DIGEST_BYTES), np.uint8)  # all zero means not known yet
        self.flaws: Sequence[Flaw] = self._index.flaws

    @property
    def num_samples(self) -> int:
        """The number of groups of members that share a key."""
        return self._index.num_samples

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Return the rows with these numbers."""
        self._file.check_unchanged()
        samples = [self._index.sample(number) for number in numbers]
        parsed = self._parse([member for members in samples for member in members])
        return [self._row(members, parsed) for members in samples]

    def locate(self, offset: int, part: str, nbytes: int) -> MediumLocation | None:
        """Return the place of the medium whose bytes begin at `offset`."""
        member = self._index.find(offset)
        formats = formats_of(member) if member else None
        if member is None or formats is None or part or member.nbytes != nbytes:
            return None
        return MediumLocation(self._file, offset, nbytes, member.key, formats)

    def _parse(self, members: Sequence[tuple[int, TarMember]]) -> Mapping[int, ReceivedRow]:
        """Return what the members that hold fields say, by their numbers."""
        wanted: dict[int, tuple[int, str, int, int]] = {}
        found: dict[int, ReceivedRow] = {}
        for at, member in members:
            kept = self._caches.fields.get((self._file, self._options, at))
            if kept is not None:
                found[at] = kept
            elif member.nbytes <= MAX_FIELDS_BYTES and holds_fields(extension := member.extension):
                wanted[at] = at, extension, member.offset, member.nbytes
        if wanted:
            arguments = {"members": list(wanted.values()), "drop": sorted(self._options.drop)}

            def take(reply: Reply) -> None:
                rows = rows_of(self._file, reply)
                cost = cost_of(reply, rows)
                for at, parsed in rows:
                    if at in wanted:
                        found[at] = parsed
                        self._caches.fields.put((self._file, self._options, at), parsed, cost)

            self._parser.call("tar members", self._file, arguments, take, READING)
        return found

    def _row(self, members: Sequence[tuple[int, TarMember]], parsed: Mapping[int, ReceivedRow]) -> Row:
        fields: dict[str, Any] = {}
        media, flaws, num_read = [], [], 0
        for at, member in members:
            found = parsed.get(at)
            formats = formats_of(member) if found is None else None
            if formats is not None:
                media.append(Medium(member.offset, "", member.nbytes, self._digest(at, member), kind_of(formats)))
                continue
            if found is None and not holds_fields(member.extension):
                continue
            found = found or ReceivedRow(reason=_too_big(member))
            fields = fields | found.fields if member.extension == JSON else found.fields | fields
            num_read += 1
            if found.reason:
                flaws.append(Flaw(member.offset, member.key, f"{member.path} {found.reason}"))
        first = members[0][1]
        # each member is within the limit, all together may not be
        fields, reason = checked_fields(fields) if num_read > 1 else (fields, "")
        if reason:
            flaws.append(Flaw(first.offset, first.key, reason))
        return Row(first.key, fields, tuple(media), tuple(flaws))

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


def _too_big(member: TarMember) -> str:
    return f"has {member.nbytes} bytes; wanted at most {MAX_FIELDS_BYTES} of fields"


def _index_of(file: RangeFile, parser: Parser, folder: Path | None) -> TarIndex:
    """Return the index of a tar, from a folder of indices if it is there."""
    index = load_index(folder, file) if folder is not None else None
    if index is None:
        index = index_of(file, ask(parser, "tar index", file, {}, opening(file)))
        if folder is not None:
            save_index(folder, file, index)
    return index
