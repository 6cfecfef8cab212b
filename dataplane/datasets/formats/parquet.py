"""Parquet files: row groups are found from the footer alone, and a read touches only the requested columns."""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.core.errors import DatasetError
from dataplane.core.lru_cache import LruCache
from dataplane.datasets.formats.range_files import RangeFile, RangeStream
from dataplane.datasets.formats.shard import Flaw

MAGIC = b"PAR1"
_MAX_BATCHES = 256
_MERGE_BYTES = 4 << 20


class ParquetGroups:
    """A Parquet file as groups of rows. Raises DatasetError if it has no readable footer."""

    def __init__(self, file: RangeFile, footers: "LruCache[pq.FileMetaData]") -> None:
        """`footers`: those that are kept."""
        self.file = file
        """The Parquet file."""
        self.flaws: Sequence[Flaw] = ()
        """The flaws. This is always empty: a torn Parquet file has no footer and so no rows at all."""
        self._footers = footers
        _check_ends(file)
        try:
            footer = pq.ParquetFile(_source(file)).metadata
            self.schema = footer.schema.to_arrow_schema()
            """The schema, with the metadata that Arrow kept in it."""
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{file.path} is not a readable Parquet file: {error}") from error
        footers.put(file, footer, footer.serialized_size)
        groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
        self.starts = np.cumsum([0, *(group.num_rows for group in groups)])
        """The first row of each group, and the number of rows: num_groups + 1 numbers."""
        # asking for sizes by column aborts the process on damaged footers
        self._nbytes = [group.total_byte_size for group in groups]

    def nbytes(self, group: int, columns: Sequence[str]) -> int:
        """Return the uncompressed bytes of all columns of a row group. This is the estimate for any choice of
        `columns`."""
        return self._nbytes[group]

    def read(self, group: int, columns: Sequence[str], max_bytes: int) -> pa.Table:
        """Return these columns of a row group. A few rows are decoded at a time, because equal cells are stored once,
        but each of them takes memory when it is decoded."""
        footer = self._footers.get(self.file)
        with pq.ParquetFile(_source(self.file), metadata=footer, pre_buffer=not self.file.is_local) as parquet:
            if footer is None:
                self._footers.put(self.file, parquet.metadata, parquet.metadata.serialized_size)
            num_rows = self._batch_rows(group, max_bytes)
            batches = parquet.iter_batches(num_rows, row_groups=[group], columns=list(columns), use_threads=False)
            return _collect(batches, f"{self.file.path}: row group {group}", max_bytes)

    def _batch_rows(self, group: int, max_bytes: int) -> int:
        """Return how many rows to read at once, so that they take at most an eighth of the limit even if each were as
        large as the whole group in the file."""
        few = int(self.starts[group + 1] - self.starts[group]) // _MAX_BATCHES
        return max(1, min(few, max_bytes // 8 // max(1, self._nbytes[group])))

    def offset_in_file(self, address: int) -> int | None:
        """Return None, because pages are encoded and mostly compressed."""
        return None


def _collect(batches: Iterator[pa.RecordBatch], what: str, max_bytes: int) -> pa.Table:
    """Return one table of the batches, in chunks of a few MB. Raises DatasetError as soon as it would be too large."""
    tables: list[pa.Table] = []
    pending: list[pa.RecordBatch] = []
    done_bytes = pending_bytes = 0
    for batch in batches:
        pending.append(_decoded(batch))
        pending_bytes += pending[-1].nbytes
        if done_bytes + pending_bytes > max_bytes:
            raise DatasetError(
                f"{what} takes more than {max_bytes} bytes once it is decoded, though its footer says less: it repeats "
                "what it stores; write the file with fewer rows per group (row_group_size=100)"
            )
        if pending_bytes > _MERGE_BYTES:
            tables.append(pa.Table.from_batches(pending).combine_chunks())
            done_bytes, pending_bytes, pending = done_bytes + pending_bytes, 0, []
    if pending:
        tables.append(pa.Table.from_batches(pending).combine_chunks())
    return pa.concat_tables(tables)


def _decoded(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the batch without dictionaries. With them, each batch would count, and keep, the whole dictionary."""
    for at, field in enumerate(batch.schema):
        if pa.types.is_dictionary(field.type):
            batch = batch.set_column(at, field.name, batch.column(at).dictionary_decode())
    return batch


def _check_ends(file: RangeFile) -> None:
    if file.nbytes < 12:
        raise DatasetError(f"{file.path} has {file.nbytes} bytes; wanted a Parquet file")
    head, tail = file.read(0, 4), file.read(file.nbytes - 4, 4)
    if head != MAGIC:
        raise DatasetError(f"{file.path} begins with {head!r}; wanted a Parquet file, which begins with {MAGIC!r}")
    if tail != MAGIC:
        raise DatasetError(
            f"{file.path} ends with {tail!r}; a Parquet file ends with {MAGIC!r}: it is torn, or still being written"
        )


def _source(file: RangeFile) -> pa.NativeFile:
    return pa.PythonFile(RangeStream(file), mode="r")
