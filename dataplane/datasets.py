"""Datasets a node may read: WebDataset shards under roots that the node's owner registered, indexed once.

A client names a dataset, never a path. `ingest` reads tar headers; `samples` reads the `.json` member and hashes the
media members of the samples asked for (the digest is their name); nothing is decoded here.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dataplane.byte_ranges import RangeFile, find_files
from dataplane.digests import content_digest, source_name
from dataplane.errors import BadRequestError, DatasetError
from dataplane.media import MEDIA_FORMATS
from dataplane.refs import BadMedia, Dataset, Lineage, Ref, Sample
from dataplane.tar_index import TarMember, index_tar

MAX_MEDIUM_BYTES = 1 << 29
"""More than any image that would be decoded; a node reads whole media to name them."""
MAX_FIELDS_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a medium's encoded bytes lie, and what its name says it is."""

    file: RangeFile
    offset: int
    nbytes: int
    key: str
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Shard:
    name: str
    file: RangeFile
    samples: tuple[tuple[TarMember, ...], ...]
    by_offset: Mapping[int, TarMember]


@dataclass(frozen=True, slots=True)
class _Index:
    shards: tuple[_Shard, ...]
    by_name: Mapping[str, _Shard]
    starts: np.ndarray  # [num_shards + 1] number of the first sample of each shard
    dataset: Dataset


class Datasets:
    """The registered roots of a node and the indices made of them so far. Thread-safe."""

    def __init__(self, roots: Mapping[str, Sequence[str]], node_id: str) -> None:
        self._roots = {name: tuple(patterns) for name, patterns in roots.items()}
        self._node_id = node_id
        self._ingesting = {name: threading.Lock() for name in self._roots}
        self._indices: dict[str, _Index] = {}
        self._digests: dict[tuple[RangeFile, int], str] = {}

    def ingest(self, name: str) -> Dataset:
        """Index a dataset (again if its files changed). Raises DatasetError if nothing in it can be used."""
        self._check_registered(name)
        with self._ingesting[name]:
            files = _find_shards(name, self._roots[name])
            index = self._indices.get(name)
            if index is None or [shard.file for shard in index.shards] != files:
                index = _build_index(name, files)
                self._indices[name] = index
            return index.dataset

    def samples(self, name: str, numbers: Sequence[int]) -> list[Sample]:
        """The samples with these numbers, in this order."""
        index = self._index(name)
        return [self._read_sample(index, number) for number in numbers]

    def locate(self, lineage: Lineage) -> Place:
        """Where a lineage points. Raises DatasetError unless it is exactly a media member of a registered shard."""
        shard = self._index(lineage.dataset).by_name.get(lineage.shard)
        member = shard.by_offset.get(lineage.offset) if shard else None
        if shard is None or member is None or member.nbytes != lineage.nbytes:
            raise DatasetError(
                f"dataset {lineage.dataset!r} has no medium of {lineage.nbytes} bytes at {lineage.shard}:"
                f"{lineage.offset}; the shards changed since the ref was made: ingest them again"
            )
        return Place(shard.file, member.offset, member.nbytes, member.key, _formats(member) or ())

    def stat(self) -> dict[str, dict[str, int]]:
        """What was ingested so far; a registered dataset that nobody ingested has no samples yet."""
        indices = dict(self._indices)
        found = {}
        for name in self._roots:
            dataset = indices[name].dataset if name in indices else None
            found[name] = {
                "num_samples": dataset.num_samples if dataset else 0,
                "num_shards": dataset.num_shards if dataset else 0,
                "num_bad": len(dataset.bad) if dataset else 0,
            }
        return found

    def _check_registered(self, name: str) -> None:
        if name not in self._roots:
            known = ", ".join(sorted(self._roots)) or "none"
            raise DatasetError(f"dataset {name!r} is not registered; this node has: {known}. Add --root {name}=GLOB")

    def _index(self, name: str) -> _Index:
        index = self._indices.get(name)
        if index is None:
            self.ingest(name)
            index = self._indices[name]
        return index

    def _read_sample(self, index: _Index, number: int) -> Sample:
        total = index.dataset.num_samples
        if not 0 <= number < total:
            raise BadRequestError(f"sample {number} of dataset {index.dataset.name!r}; wanted 0 to {total - 1}")
        at = int(np.searchsorted(index.starts, number, side="right")) - 1
        shard = index.shards[at]
        members = shard.samples[number - int(index.starts[at])]
        fields: Mapping[str, Any] = {}
        media, bad = [], []
        for member in members:
            if _formats(member):
                media.append(self._source_ref(index.dataset.name, shard, member))
            elif member.extension == "json":
                fields, reason = _read_fields(shard.file, member)
                if reason:
                    bad.append(_bad(index.dataset.name, shard.name, member, reason))
        return Sample(
            index=number, key=members[0].key, shard=shard.name, fields=fields, media=tuple(media), bad=tuple(bad)
        )

    def _source_ref(self, dataset: str, shard: _Shard, member: TarMember) -> Ref:
        place = (shard.file, member.offset)
        digest = self._digests.get(place)
        if digest is None:
            digest = content_digest(shard.file.read(member.offset, member.nbytes))
            self._digests[place] = digest
        lineage = Lineage(
            dataset=dataset,
            shard=shard.name,
            offset=member.offset,
            nbytes=member.nbytes,
            source=digest,
            recipe=None,
        )
        return Ref(
            name=source_name(digest),
            kind="source",
            dtype="uint8",
            shape=(member.nbytes,),
            nbytes=member.nbytes,
            node=self._node_id,
            lineage=lineage,
        )


def _find_shards(name: str, patterns: Sequence[str]) -> list[RangeFile]:
    """The files of every pattern, each once; a pattern that matches nothing is a mistake."""
    files: dict[str, RangeFile] = {}
    for pattern in patterns:
        found = find_files(pattern)
        if not found:
            raise DatasetError(
                f"dataset {name!r}: no file matches {pattern!r} (from {Path.cwd()}); check the --root of the node"
            )
        files |= {file.path: file for file in found}
    return list(files.values())


def _build_index(name: str, files: Sequence[RangeFile]) -> _Index:
    shards, bad = [], []
    for shard_name, file in zip(_shard_names(files), files, strict=True):
        tar = index_tar(file)
        huge = [member for sample in tar.samples for member in sample if _is_huge(member)]
        huge_keys = {member.key for member in huge}
        samples = tuple(sample for sample in tar.samples if sample[0].key not in huge_keys)
        media = (member for sample in samples for member in sample if _formats(member))
        shards.append(_Shard(shard_name, file, samples, {member.offset: member for member in media}))
        bad += [
            _bad(name, shard_name, member, f"{member.nbytes} encoded bytes; wanted at most {MAX_MEDIUM_BYTES}")
            for member in huge
        ]
        bad += [
            BadMedia(dataset=name, shard=shard_name, key=flaw.key, reason=flaw.reason, offset=flaw.offset)
            for flaw in tar.flaws
        ]
    starts = np.cumsum([0, *(len(shard.samples) for shard in shards)])
    if not starts[-1]:
        raise DatasetError(
            f"dataset {name!r}: no sample in {len(files)} shard(s), first {files[0].path}"
            + (f": {bad[0].reason}" if bad else "; wanted members like 000.png and 000.json")
        )
    dataset = Dataset(name=name, num_samples=int(starts[-1]), num_shards=len(shards), bad=tuple(bad))
    return _Index(tuple(shards), {shard.name: shard for shard in shards}, starts, dataset)


def _shard_names(files: Sequence[RangeFile]) -> list[str]:
    """File names where they tell the shards apart, else whole paths."""
    names = [PurePosixPath(file.path).name for file in files]
    return names if len(set(names)) == len(names) else [file.path for file in files]


def _formats(member: TarMember) -> tuple[str, ...] | None:
    return MEDIA_FORMATS.get(member.extension.rpartition(".")[2])


def _is_huge(member: TarMember) -> bool:
    return _formats(member) is not None and member.nbytes > MAX_MEDIUM_BYTES


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


def _bad(dataset: str, shard: str, member: TarMember, reason: str) -> BadMedia:
    return BadMedia(dataset=dataset, shard=shard, key=member.key, reason=reason, offset=member.offset)
