"""Row groups of a Parquet file, from its footer alone; only the columns that are asked for are read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataplane.byte_ranges import RangeFile, RangeStream
from dataplane.errors import DatasetError
from dataplane.formats.caches import Caches
from dataplane.formats.shard import Flaw

MAGIC = b"PAR1"


class ParquetGroups:
    """A Parquet file as groups of rows. Raises DatasetError if it has no readable footer."""

    def __init__(self, file: RangeFile, caches: Caches) -> None:
        self._file = file
        self._caches = caches
        _check_ends(file)
        try:
            footer = pq.ParquetFile(_source(file)).metadata
            self._schema = footer.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{file.path} is not a readable Parquet file: {error}") from error
        caches.footers.put(file, footer, footer.serialized_size)
        groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
        self._starts = np.cumsum([0, *(group.num_rows for group in groups)])
        self._nbytes = [group.total_byte_size for group in groups]  # asking its columns aborts on damaged footers

    @property
    def file(self) -> RangeFile:
        """The file."""
        return self._file

    @property
    def schema(self) -> pa.Schema:
        """Its schema, with what Arrow kept of it."""
        return self._schema

    @property
    def starts(self) -> np.ndarray:
        """[num_groups + 1] first row of each group."""
        return self._starts

    @property
    def flaws(self) -> Sequence[Flaw]:
        """None: a torn Parquet file has no footer and so no rows at all."""
        return ()

    def nbytes(self, group: int, columns: Sequence[str]) -> int:
        """Uncompressed bytes of all columns: no less than what reading these will take."""
        return self._nbytes[group]

    def read(self, group: int, columns: Sequence[str]) -> pa.Table:
        """These columns of a row group."""
        footer = self._caches.footers.get(self._file)
        source = _source(self._file)
        with pq.ParquetFile(source, metadata=footer, pre_buffer=not self._file.is_local) as parquet:
            if footer is None:
                self._caches.footers.put(self._file, parquet.metadata, parquet.metadata.serialized_size)
            return parquet.read_row_group(group, columns=list(columns), use_threads=False)

    def offset_in_file(self, address: int) -> int | None:
        """Nowhere: pages are encoded, and mostly compressed."""
        return None


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


def _source(file: RangeFile) -> Any:
    return file.path if file.is_local else pa.PythonFile(RangeStream(file), mode="r")
