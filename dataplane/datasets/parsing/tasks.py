"""The tasks of a parser: a name, a file and arguments in, replies out. They run in the process of the parser.

The modules of a format are imported with its first task, because pyarrow takes as long to import as all the rest.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dataplane.core.errors import DatasetError
from dataplane.core.lru_cache import LruCache
from dataplane.datasets.formats.parsed_rows import replies_of
from dataplane.datasets.formats.parser import Reply
from dataplane.datasets.formats.range_files import RangeFile

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dataplane.datasets.formats.table_rows import TableReader

GROUP_CACHE_BYTES = 64 << 20
"""The limit of the cache of row groups, in bytes. A larger group is used for one task and dropped."""
FOOTER_CACHE_BYTES = 8 << 20
NUM_OPEN_TABLES = 64
"""The number of tables whose schema and groups are kept."""


class Tasks:
    """Does tasks, and keeps what the next task may need. All of it is bounded, and made again from the file where it is
    gone. Thread-safe if all files are read by their paths."""

    def __init__(self) -> None:
        self.groups: LruCache[pa.Table] = LruCache(GROUP_CACHE_BYTES)
        """The groups of rows that were read last."""
        self._footers: LruCache[pq.FileMetaData] = LruCache(FOOTER_CACHE_BYTES)
        self._tables: LruCache[TableReader] = LruCache(NUM_OPEN_TABLES)

    def run(self, task: str, file: RangeFile, arguments: Mapping[str, Any]) -> Iterator[Reply]:
        """Yield the replies of a task. Raises DatasetError if the file cannot be parsed."""
        try:
            yield from self._run(task, file, arguments)
        except DatasetError:
            raise
        except MemoryError as error:
            raise DatasetError(f"{file.path} takes more memory than a parser may use: {error}") from error
        except (ValueError, OSError, NotImplementedError) as error:  # each format's library has its own
            raise DatasetError(f"{file.path} cannot be read: {error}") from error

    def _run(self, task: str, file: RangeFile, arguments: Mapping[str, Any]) -> Iterator[Reply]:
        if task == "table":
            yield self._open_table(file, arguments)
        elif task == "table rows":
            reader = self._table(file, arguments)
            wanted = dict(arguments["rows"])
            yield from replies_of(reader.rows(wanted, arguments["part"]))
        elif task == "json items":
            yield _json_items(file)
        elif task == "json rows":
            yield from _json_rows(file, arguments)
        elif task == "tar index":
            yield _tar_index(file)
        else:
            assert task == "tar members", task
            yield from _tar_members(file, arguments)

    def _open_table(self, file: RangeFile, arguments: Mapping[str, Any]) -> Reply:
        reader = self._table(file, arguments)
        names = sorted(reader.columns.media + reader.columns.fields)
        flaws = [(flaw.offset, flaw.key, flaw.reason) for flaw in reader.flaws]
        return Reply.of({"num_rows": reader.num_rows, "columns": names, "flaws": flaws})

    def _table(self, file: RangeFile, arguments: Mapping[str, Any]) -> "TableReader":
        key = (file, str(arguments["options"]))
        reader = self._tables.get(key)
        if reader is None:
            reader = self._read_table(file, arguments)
            self._tables.put(key, reader)
        reader.file = file
        return reader

    def _read_table(self, file: RangeFile, arguments: Mapping[str, Any]) -> "TableReader":
        from dataplane.datasets.formats.arrow import ArrowGroups
        from dataplane.datasets.formats.columns import ColumnOptions
        from dataplane.datasets.formats.parquet import ParquetGroups
        from dataplane.datasets.formats.table_rows import TableReader

        groups = ArrowGroups(file) if arguments["form"] == "arrow" else ParquetGroups(file, self._footers)
        return TableReader(groups, ColumnOptions.from_dict(arguments["options"]), self.groups)


def _json_items(file: RangeFile) -> Reply:
    from dataplane.datasets.formats.json_items import find_items, reply_of

    return reply_of(find_items(file))


def _json_rows(file: RangeFile, arguments: Mapping[str, Any]) -> Iterator[Reply]:
    from dataplane.datasets.formats.json_rows import JsonNames, parse_objects

    names = JsonNames(**arguments["names"])
    yield from replies_of(parse_objects(file, arguments["items"], names, arguments["part"]))


def _tar_index(file: RangeFile) -> Reply:
    from dataplane.datasets.formats.tar_index import index_tar
    from dataplane.datasets.formats.tar_members import refusal, reply_of

    return reply_of(index_tar(file, refusal))


def _tar_members(file: RangeFile, arguments: Mapping[str, Any]) -> Iterator[Reply]:
    from dataplane.datasets.formats.member_fields import parse_members

    yield from replies_of(parse_members(file, arguments["members"], arguments["drop"]))
