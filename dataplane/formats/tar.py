"""WebDataset tars as shards: members that share a key are a row, its `.json` member holds the fields."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.byte_ranges import RangeFile
from dataplane.digests import content_digest
from dataplane.formats.shard import (
    MAX_FIELDS_BYTES,
    MAX_MEDIUM_BYTES,
    Flaw,
    Medium,
    Place,
    Row,
)
from dataplane.media import MEDIA_FORMATS
from dataplane.tar_index import TarMember, index_tar


class TarShard:
    """One tar as a shard. Thread-safe. Raises DatasetError if it is no uncompressed tar."""

    columns = None

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        tar = index_tar(file)
        huge = [member for sample in tar.samples for member in sample if _is_huge(member)]
        huge_keys = {member.key for member in huge}
        self._samples = tuple(sample for sample in tar.samples if sample[0].key not in huge_keys)
        self._by_offset = {m.offset: m for sample in self._samples for m in sample if formats_of(m) is not None}
        self._digests: dict[int, str] = {}
        self.flaws: Sequence[Flaw] = (
            *(Flaw(m.offset, m.key, f"{m.nbytes} encoded bytes; wanted at most {MAX_MEDIUM_BYTES}") for m in huge),
            *tar.flaws,
        )

    @property
    def num_samples(self) -> int:
        """Groups of members that share a key."""
        return len(self._samples)

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows with these numbers."""
        self._file.check_unchanged()
        return [self._row(number) for number in numbers]

    def locate(self, offset: int, part: str, nbytes: int) -> Place | None:
        """The place of the medium whose bytes begin at `offset`."""
        member = self._by_offset.get(offset)
        if member is None or part or member.nbytes != nbytes:
            return None
        return Place(self._file, offset, nbytes, member.key, formats_of(member) or ())

    def _row(self, number: int) -> Row:
        members = self._samples[number]
        fields: Mapping[str, Any] = {}
        media, flaws = [], []
        for member in members:
            if formats_of(member) is not None:
                media.append(Medium(member.offset, "", member.nbytes, self._digest(member)))
            elif member.extension == "json":
                fields, reason = _read_fields(self._file, member)
                if reason:
                    flaws.append(Flaw(member.offset, member.key, reason))
        return Row(members[0].key, fields, tuple(media), tuple(flaws))

    def _digest(self, member: TarMember) -> str:
        digest = self._digests.get(member.offset)
        if digest is None:
            digest = content_digest(self._file.read(member.offset, member.nbytes))
            self._digests[member.offset] = digest
        return digest


def formats_of(member: TarMember) -> tuple[str, ...] | None:
    """What a media member may hold; None for members that are no media."""
    return MEDIA_FORMATS.get(member.extension.rpartition(".")[2])


def _is_huge(member: TarMember) -> bool:
    return formats_of(member) is not None and member.nbytes > MAX_MEDIUM_BYTES


def _read_fields(file: RangeFile, member: TarMember) -> tuple[Mapping[str, Any], str | None]:
    if member.nbytes > MAX_FIELDS_BYTES:
        return {}, f"{member.path} has {member.nbytes} bytes; wanted at most {MAX_FIELDS_BYTES} of JSON"
    try:
        fields = json.loads(file.read(member.offset, member.nbytes))
    except (ValueError, RecursionError) as error:
        return {}, f"{member.path} is not JSON: {error}"
    if not isinstance(fields, dict):
        return {}, f"{member.path} holds a JSON {type(fields).__name__}; wanted an object"
    return fields, None
