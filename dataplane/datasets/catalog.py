"""The catalog of a node's datasets: files under roots that the node's owner registered, indexed once.

A client names a dataset, never a path. `ingest` indexes shards (headers, footers, line ends). `samples` reads the
requested rows and hashes their media; the digest is the name of a medium. Nothing is decoded here, and files are parsed
by a parser (`parsing/`). The file formats are in `formats/`.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from dataplane.core.digests import source_name
from dataplane.core.errors import BadRequestError, DatasetError
from dataplane.core.refs import BadMedia, Dataset, Lineage, Ref, Sample
from dataplane.datasets.formats.caches import Caches
from dataplane.datasets.formats.jsonl import JsonShard
from dataplane.datasets.formats.media_paths import media_folders
from dataplane.datasets.formats.parser import Parser
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import Flaw, Medium, Row, Shard
from dataplane.datasets.formats.shard import MediumLocation as MediumLocation
from dataplane.datasets.formats.table import TableShard
from dataplane.datasets.formats.tar import TarShard
from dataplane.datasets.parsing.in_process import InProcess
from dataplane.datasets.roots import DatasetFiles, find_dataset_files

MAX_INGEST_THREADS = 16


@dataclass(frozen=True, slots=True)
class _Index:
    files: tuple[RangeFile, ...]
    """All files of the dataset, including those that cannot be used."""
    names: tuple[str, ...]
    shards: tuple[Shard, ...]
    by_name: Mapping[str, Shard]
    starts: np.ndarray  # [num_shards + 1] number of the first sample of each shard
    dataset: Dataset


@dataclass(slots=True)
class _Progress:
    """The progress of an ingest."""

    num_found: int = 0
    num_read: int = 0


class Catalog:
    """The registered roots of a node and their indices so far. Thread-safe."""

    def __init__(
        self,
        roots: Mapping[str, Sequence[str]],
        node_id: str,
        media_roots: Sequence[Path] = (),
        index_dir: Path | None = None,
        parser: Parser | None = None,
    ) -> None:
        """`index_dir`: where the indices of tars are kept for later nodes; None keeps none. `parser`: what parses the
        files; None parses them in this process, which a damaged file may end."""
        self._roots = {name: tuple(patterns) for name, patterns in roots.items()}
        self._node_id = node_id
        self._media_roots = tuple(media_roots)
        self._index_dir = index_dir
        self._parser = parser or InProcess()
        self._caches = Caches()
        self._ingesting = {name: threading.Lock() for name in self._roots}
        self._progress = {name: _Progress() for name in self._roots}
        self._indices: dict[str, _Index] = {}

    def ingest(self, name: str) -> Dataset:
        """Index a dataset, again if its files changed, and return its counts. Raises DatasetError if no sample of it
        can be used."""
        self._check_registered(name)
        with self._ingesting[name]:
            found = find_dataset_files(name, self._roots[name])
            index = self._indices.get(name)
            if index is None or list(index.files) != [item.file for item in found]:
                index = self._build_index(name, found)
                self._indices[name] = index
            return index.dataset

    def samples(self, name: str, numbers: Sequence[int]) -> list[Sample]:
        """Return the samples with these numbers, in this order."""
        index = self._index(name)
        total = index.dataset.num_samples
        wrong = [number for number in numbers if not 0 <= number < total]
        if wrong:
            raise BadRequestError(f"sample {wrong[0]} of dataset {name!r}; wanted 0 to {total - 1}")
        by_shard: dict[int, list[int]] = defaultdict(list)
        for number in numbers:
            by_shard[int(np.searchsorted(index.starts, number, side="right")) - 1].append(number)
        samples: dict[int, Sample] = {}
        for at, members in by_shard.items():
            start = int(index.starts[at])
            rows = index.shards[at].rows([number - start for number in members])
            for number, row in zip(members, rows, strict=True):
                samples[number] = self._sample(name, index.names[at], number, row)
        return [samples[number] for number in numbers]

    def locate(self, lineage: Lineage) -> MediumLocation:
        """Return the place of the medium with this lineage. Raises DatasetError unless the lineage is exactly that of a
        medium in a registered shard."""
        shard = self._index(lineage.dataset).by_name.get(lineage.shard)
        place = shard.locate(lineage.offset, lineage.part, lineage.nbytes) if shard else None
        if place is None:
            part = f" {lineage.part}" if lineage.part else ""
            raise DatasetError(
                f"dataset {lineage.dataset!r} has no medium of {lineage.nbytes} bytes at {lineage.shard}:"
                f"{lineage.offset}{part}; the shards changed since the ref was made: ingest them again"
            )
        return place

    def take_encoded(self, digest: str) -> bytes | None:
        """Return the encoded bytes with this digest if `samples` read them lately and they were not taken since."""
        return self._caches.encoded.take(digest)

    def stat(self) -> dict[str, dict[str, int]]:
        """Return the counts of each registered dataset. Before it is ingested, a dataset has no samples."""
        indices = dict(self._indices)
        found = {}
        for name in self._roots:
            dataset = indices[name].dataset if name in indices else None
            progress = self._progress[name]
            found[name] = {
                "num_samples": dataset.num_samples if dataset else 0,
                "num_shards": dataset.num_shards if dataset else 0,
                "num_bad": len(dataset.bad) if dataset else 0,
                "num_shards_found": progress.num_found,
                "num_shards_read": progress.num_read,
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

    def _build_index(self, name: str, found: Sequence[DatasetFiles]) -> _Index:
        progress = self._progress[name] = _Progress(num_found=len(found))

        def read(item: DatasetFiles) -> Shard | DatasetError:
            try:
                return self._open(item)
            except DatasetError as error:
                return error
            except (ValueError, OSError) as error:  # damage, which each format's library describes in its own way
                return DatasetError(f"{item.file.path} cannot be read: {error}")
            finally:
                progress.num_read += 1  # only for display: a lost count does no harm

        with ThreadPoolExecutor(min(MAX_INGEST_THREADS, 2 * (os.cpu_count() or 1)), "ingest") as threads:
            opened = list(threads.map(read, found))
        return _index_of(name, [item.file for item in found], opened)

    def _open(self, item: DatasetFiles) -> Shard:
        file, options = item.file, item.root.options
        if item.format == "tar":
            return TarShard(file, options, self._caches, self._parser, self._index_dir)
        folders = media_folders(file, item.root.folder, self._media_roots)
        if item.format == "jsonl":
            return JsonShard(file, folders, options, self._caches, self._parser)
        return TableShard(file, item.format, folders, options, self._caches, self._parser)

    def _sample(self, dataset: str, shard: str, number: int, row: Row) -> Sample:
        return Sample(
            index=number,
            key=row.key,
            shard=shard,
            fields=row.fields,
            media=tuple(self._source_ref(dataset, shard, medium) for medium in row.media),
            bad=tuple(_bad(dataset, shard, flaw) for flaw in row.flaws),
        )

    def _source_ref(self, dataset: str, shard: str, medium: Medium) -> Ref:
        lineage = Lineage(
            dataset=dataset,
            shard=shard,
            offset=medium.offset,
            nbytes=medium.nbytes,
            source=medium.digest,
            recipe=None,
            part=medium.part,
        )
        return Ref(
            name=source_name(medium.digest),
            kind="source",
            dtype="uint8",
            shape=(medium.nbytes,),
            nbytes=medium.nbytes,
            node=self._node_id,
            lineage=lineage,
            meta={"medium": medium.kind},
        )


def _index_of(name: str, files: Sequence[RangeFile], opened: Sequence[Shard | DatasetError]) -> _Index:
    """Return the index of the shards that could be opened; the other shards are listed as bad. Raises DatasetError if
    there is no sample."""
    names: list[str] = []
    shards: list[Shard] = []
    bad: list[BadMedia] = []
    for shard_name, shard in zip(_shard_names(files), opened, strict=True):
        if isinstance(shard, DatasetError):
            bad.append(_bad(name, shard_name, Flaw(-1, "", str(shard))))
            continue
        names.append(shard_name)
        shards.append(shard)
        bad += [_bad(name, shard_name, flaw) for flaw in shard.flaws]
    _check_columns(name, names, shards)
    starts = np.cumsum([0, *(shard.num_samples for shard in shards)])
    if not starts[-1]:
        raise DatasetError(
            f"dataset {name!r}: no sample in {len(files)} shard(s)"
            + (f": {bad[0].reason}" if bad else f", first {files[0].path}; wanted members like 000.png, or rows")
        )
    dataset = Dataset(name=name, num_samples=int(starts[-1]), num_shards=len(shards), bad=tuple(bad))
    return _Index(tuple(files), tuple(names), tuple(shards), dict(zip(names, shards, strict=True)), starts, dataset)


def _check_columns(name: str, names: Sequence[str], shards: Sequence[Shard]) -> None:
    """Check that the shards of one dataset have the same columns."""
    for shard_name, shard in zip(names, shards, strict=True):
        if shard.columns != shards[0].columns:
            first, other = set(shards[0].columns or ()), set(shard.columns or ())
            raise DatasetError(
                f"dataset {name!r}: {shard_name} has other columns than {names[0]}: "
                f"it lacks {', '.join(sorted(first - other)) or 'none'}, it alone has "
                f"{', '.join(sorted(other - first)) or 'none'}; register them under two names, or write them alike"
            )


def _shard_names(files: Sequence[RangeFile]) -> list[str]:
    """Return the file names of the shards if they differ from each other, otherwise the whole paths."""
    names = [PurePosixPath(file.path).name for file in files]
    return names if len(set(names)) == len(names) else [file.path for file in files]


def _bad(dataset: str, shard: str, flaw: Flaw) -> BadMedia:
    return BadMedia(dataset=dataset, shard=shard, key=flaw.key, reason=flaw.reason, offset=flaw.offset)
