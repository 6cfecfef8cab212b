"""Record batches of an Arrow stream or file, as Hugging Face's `datasets` saves them.

Indexing walks over the messages' headers. A local file is mapped: its media are byte ranges that workers read by
themselves; of a remote one a batch is read as a whole. Left out: dictionary-encoded columns.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataplane.byte_ranges import RangeFile
from dataplane.errors import DatasetError
from dataplane.formats.shard import Flaw

FILE_MAGIC = b"ARROW1\0\0"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_MAX_HEADER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of the stream: where it is, and what its header says."""

    offset: int
    nbytes: int
    body_bytes: int
    kind: int
    num_rows: int
    is_compressed: bool


class ArrowGroups:
    """An Arrow stream or file as groups of rows; what follows a tear is a flaw.

    Raises DatasetError if it has no schema, or columns that cannot be read.
    """

    def __init__(self, file: RangeFile) -> None:
        self._file = file
        self._flaws: list[Flaw] = []
        self._mapping = pa.memory_map(file.path).read_buffer() if file.is_local and file.nbytes else None
        self._batches: list[_Message] = []
        self._schema = self._scan()
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        encoded = [field.name for field in self._schema if pa.types.is_dictionary(field.type)]
        if encoded:
            raise DatasetError(
                f"{file.path}: column {encoded[0]!r} is dictionary-encoded; write it plainly, or as Parquet"
            )

    @property
    def file(self) -> RangeFile:
        """The file."""
        return self._file

    @property
    def schema(self) -> pa.Schema:
        """Its schema, with what `datasets` keeps in it."""
        return self._schema

    @property
    def starts(self) -> np.ndarray:
        """[num_batches + 1] first row of each record batch."""
        return self._starts

    @property
    def flaws(self) -> Sequence[Flaw]:
        """Where the file is torn."""
        return self._flaws

    def nbytes(self, group: int, columns: Sequence[str]) -> int:
        """Bytes of the whole batch; 0 where it is mapped."""
        batch = self._batches[group]
        return 0 if self._mapping is not None and not batch.is_compressed else batch.body_bytes

    def read(self, group: int, columns: Sequence[str], max_bytes: int) -> pa.Table:
        """These columns of a record batch."""
        batch = self._batches[group]
        message = pa.ipc.read_message(self._bytes(batch.offset, batch.nbytes))
        found = pa.ipc.read_record_batch(message, self._schema).select(list(columns))
        found.validate(full=True)  # or damaged offsets would lead out of the file's memory
        return pa.Table.from_batches([found])

    def offset_in_file(self, address: int) -> int | None:
        """Where in the file the bytes at an address of memory are, if they are mapped."""
        if self._mapping is None or not 0 <= address - self._mapping.address < self._mapping.size:
            return None
        return address - self._mapping.address

    def _bytes(self, offset: int, nbytes: int) -> pa.Buffer:
        if self._mapping is not None:
            return self._mapping.slice(offset, nbytes)
        return pa.py_buffer(self._file.read(offset, nbytes))

    def _scan(self) -> pa.Schema:
        """The schema; remembers record batches and flaws."""
        head = self._file.read(0, len(FILE_MAGIC))
        at = len(FILE_MAGIC) if head == FILE_MAGIC else 0
        schema: pa.Schema | None = None
        while True:
            try:
                message = self._read_message(at)
            except ValueError as error:
                self._flaws.append(Flaw(self._num_rows(), "", f"byte {at}: {error}"))
                break
            if message is None:
                break
            if message.kind == _SCHEMA and schema is None:
                schema = self._read_schema(message)
            elif message.kind == _RECORD_BATCH and schema is not None:
                self._batches.append(message)
            at = message.offset + message.nbytes
        if schema is None:
            reason = self._flaws[0].reason if self._flaws else "no schema"
            raise DatasetError(f"{self._file.path} ({self._file.nbytes} bytes) is no Arrow stream or file: {reason}")
        return schema

    def _num_rows(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def _read_schema(self, message: _Message) -> pa.Schema:
        try:
            return pa.ipc.read_schema(pa.ipc.read_message(self._bytes(message.offset, message.nbytes)))
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{self._file.path} has an unreadable Arrow schema: {error}") from error

    def _read_message(self, at: int) -> _Message | None:
        """The message at a byte of the file; None at its end. ValueError says what is there instead."""
        prefix = self._file.read(at, 8)
        if len(prefix) < 8:
            raise ValueError("the file ends without an end-of-stream marker: torn, or still being written")
        marker, header_bytes = struct.unpack("<Ii", prefix)
        if marker != _CONTINUATION:
            raise ValueError(f"no Arrow message ({prefix!r})")
        if header_bytes == 0:
            return None
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"a message header of {header_bytes} bytes; wanted at most {_MAX_HEADER_BYTES}")
        header = self._file.read(at + 8, header_bytes)
        try:
            kind, num_rows, body_bytes, is_compressed = _parse_header(header)
        except (struct.error, IndexError) as error:
            raise ValueError(f"a damaged message header: {error}") from error
        nbytes = 8 + header_bytes + body_bytes
        if body_bytes < 0 or num_rows < 0 or at + nbytes > self._file.nbytes:
            raise ValueError(f"a message wants {nbytes} bytes, the file has {self._file.nbytes - at} more: torn")
        return _Message(at, nbytes, body_bytes, kind, num_rows, is_compressed)


def _parse_header(data: bytes) -> tuple[int, int, int, bool]:
    """Kind, rows, bytes of the body and whether it is compressed: four fields of Arrow's Message flatbuffer."""
    message = _table_at(data, 0)
    kind = _field(data, message, 1, "<B")
    body_bytes = _field(data, message, 3, "<q")
    if kind != _RECORD_BATCH:
        return kind, 0, body_bytes, False
    batch = _table_at(data, message + _slot(data, message, 2))
    return kind, _field(data, batch, 0, "<q"), body_bytes, bool(_slot(data, batch, 3))


def _table_at(data: bytes, at: int) -> int:
    return at + int(_unpack(data, at, "<I"))


def _slot(data: bytes, table: int, field: int) -> int:
    """Where in its table a field lies; 0 where it was left out."""
    vtable = table - _unpack(data, table, "<i")
    return _unpack(data, vtable + 4 + 2 * field, "<H") if 4 + 2 * field < _unpack(data, vtable, "<H") else 0


def _field(data: bytes, table: int, field: int, kind: str) -> int:
    slot = _slot(data, table, field)
    return _unpack(data, table + slot, kind) if slot else 0


def _unpack(data: bytes, at: int, kind: str) -> int:
    if at < 0:
        raise IndexError(f"a field at {at}")
    return int(struct.unpack_from(kind, data, at)[0])
