"""Arrow streams and files, as Hugging Face's `datasets` saves them: their record batches are the groups of rows.

Indexing reads the headers of the messages. Of a local file only the bytes that are not media are read, each to its own
offset in memory as large as the batch; workers read the media themselves as byte ranges. The file is not mapped,
because a file that is cut while it is mapped ends the process. A batch of a remote or compressed file is read as a
whole.
Dictionary-encoded columns are not supported.
"""

import mmap
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dataplane.core.errors import DatasetError
from dataplane.datasets.formats.columns import is_list
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import Flaw

FILE_MAGIC = b"ARROW1\0\0"
_CONTINUATION = 0xFFFFFFFF
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_MAX_HEADER_BYTES = 64 << 20
_MAP_NORESERVE = 0x4000  # Linux; Python 3.11 has no name for it
_UNTOUCHED = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
"""Such a mapping takes no memory before it is written, and none of the limit of a parser's private memory."""


@dataclass(frozen=True, slots=True)
class _Message:
    """One message of the stream: its place in the file, and what its header says."""

    offset: int
    nbytes: int
    body_bytes: int
    kind: int
    num_rows: int
    is_compressed: bool


class ArrowGroups:
    """An Arrow stream or file as groups of rows. If the file is cut short or damaged, everything from there on is
    reported as a flaw.

    Raises DatasetError if the file has no schema, or has columns that cannot be read.
    """

    def __init__(self, file: RangeFile) -> None:
        self.file = file
        """The Arrow file."""
        self.flaws: list[Flaw] = []
        """The flaws: the places where the file is torn."""
        self._read: dict[int, _Message] = {}
        """The batches in use: from the address of a batch's memory to its place in the file."""
        self._batches: list[_Message] = []
        self.schema = self._scan()
        """The schema, with the metadata that `datasets` keeps in it."""
        self.starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        """The first row of each record batch, and the number of rows: num_batches + 1 numbers."""
        encoded = [field.name for field in self.schema if pa.types.is_dictionary(field.type)]
        if encoded:
            raise DatasetError(
                f"{file.path}: column {encoded[0]!r} is dictionary-encoded; write it plainly, or as Parquet"
            )

    def nbytes(self, group: int, columns: Sequence[str]) -> int:
        """Return the memory that reading takes, in bytes: that of the whole batch, or 0 if the media are not read but
        stay in the file."""
        batch = self._batches[group]
        return 0 if self._is_sparse(batch) else batch.body_bytes

    def read(self, group: int, columns: Sequence[str], max_bytes: int) -> pa.Table:
        """Return these columns of a record batch. Media that `offset_in_file` finds in the file are not read: zeros
        stand in their place."""
        batch = self._batches[group]
        if self._is_sparse(batch):
            found = self._read_sparse(batch, columns, max_bytes)
        else:
            data = self.file.read(batch.offset, batch.nbytes)
            _check_uncompressed(data, batch, max_bytes)
            found = self._parse(pa.py_buffer(data), columns)
        found.validate(full=True)  # otherwise damaged offsets would lead out of the file's memory
        return pa.Table.from_batches([found])

    def offset_in_file(self, address: int) -> int | None:
        """Return the file offset of the bytes at a memory address; None if they are not from the file."""
        for start, batch in list(self._read.items()):
            if 0 <= address - start < batch.nbytes:
                return batch.offset + address - start
        return None

    def _is_sparse(self, batch: _Message) -> bool:
        return self.file.is_local and not batch.is_compressed

    def _read_sparse(self, batch: _Message, columns: Sequence[str], max_bytes: int) -> pa.RecordBatch:
        memory = np.frombuffer(mmap.mmap(-1, batch.nbytes, flags=_UNTOUCHED), np.uint8)
        start = memory.ctypes.data
        header_bytes = batch.nbytes - batch.body_bytes
        memory[:header_bytes] = self._exactly(batch.offset, header_bytes)
        found = self._parse(pa.py_buffer(memory), columns)
        wanted = {(buffer.address - start, buffer.size) for column in found.columns for buffer in _not_media(column)}
        total = sum(nbytes for _, nbytes in wanted)
        if total > max_bytes:
            raise DatasetError(
                f"{self.file.path}: a batch has {total} bytes beside its media; wanted at most {max_bytes}: write the "
                "file with fewer rows per batch (writer_batch_size=100)"
            )
        for at, nbytes in wanted:
            memory[at : at + nbytes] = self._exactly(batch.offset + at, nbytes)
        self._read[start] = batch
        weakref.finalize(memory, self._read.pop, start, None)
        return found

    def _parse(self, data: pa.Buffer, columns: Sequence[str]) -> pa.RecordBatch:
        return pa.ipc.read_record_batch(pa.ipc.read_message(data), self.schema).select(list(columns))

    def _exactly(self, offset: int, nbytes: int) -> np.ndarray:
        data = self.file.read(offset, nbytes)
        if len(data) != nbytes:
            raise DatasetError(f"{self.file.path} ends at {offset + len(data)}: it was cut while it was read")
        return np.frombuffer(data, np.uint8)

    def _scan(self) -> pa.Schema:
        """Return the schema, after noting the record batches and the flaws."""
        head = self.file.read(0, len(FILE_MAGIC))
        at = len(FILE_MAGIC) if head == FILE_MAGIC else 0
        schema: pa.Schema | None = None
        while True:
            try:
                message = self._read_message(at)
            except ValueError as error:
                self.flaws.append(Flaw(self._num_rows(), "", f"byte {at}: {error}"))
                break
            if message is None:
                break
            if message.kind == _SCHEMA and schema is None:
                schema = self._read_schema(message)
            elif message.kind == _RECORD_BATCH and schema is not None:
                self._batches.append(message)
            at = message.offset + message.nbytes
        if schema is None:
            reason = self.flaws[0].reason if self.flaws else "no schema"
            raise DatasetError(f"{self.file.path} ({self.file.nbytes} bytes) is no Arrow stream or file: {reason}")
        return schema

    def _num_rows(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def _read_schema(self, message: _Message) -> pa.Schema:
        try:
            return pa.ipc.read_schema(pa.ipc.read_message(self.file.read(message.offset, message.nbytes)))
        except (pa.ArrowException, OSError) as error:
            raise DatasetError(f"{self.file.path} has an unreadable Arrow schema: {error}") from error

    def _read_message(self, at: int) -> _Message | None:
        """Return the message that begins at this byte of the file; None at the file's end. Raises ValueError if no
        message begins there."""
        prefix = self.file.read(at, 8)
        if len(prefix) < 8:
            raise ValueError("the file ends without an end-of-stream marker: torn, or still being written")
        marker, header_bytes = struct.unpack("<Ii", prefix)
        if marker != _CONTINUATION:
            raise ValueError(f"no Arrow message ({prefix!r})")
        if header_bytes == 0:
            return None
        if not 0 < header_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(f"a message header of {header_bytes} bytes; wanted at most {_MAX_HEADER_BYTES}")
        header = self.file.read(at + 8, header_bytes)
        try:
            kind, num_rows, body_bytes, is_compressed = _parse_header(header)
        except (struct.error, IndexError) as error:
            raise ValueError(f"a damaged message header: {error}") from error
        nbytes = 8 + header_bytes + body_bytes
        if body_bytes < 0 or num_rows < 0 or at + nbytes > self.file.nbytes:
            raise ValueError(f"a message wants {nbytes} bytes, the file has {self.file.nbytes - at} more: torn")
        return _Message(at, nbytes, body_bytes, kind, num_rows, is_compressed)


def _not_media(array: pa.Array) -> Iterator[pa.Buffer]:
    """Yield the buffers of a column, except the bytes of binary cells."""
    left_out = set(_data_of_cells(array))
    for buffer in array.buffers():
        if buffer is not None and buffer.size and buffer.address not in left_out:
            yield buffer


def _data_of_cells(array: pa.Array) -> Iterator[int]:
    """Yield the addresses of the bytes of binary cells."""
    if isinstance(array, pa.ExtensionArray):
        yield from _data_of_cells(array.storage)
    elif pa.types.is_struct(array.type):
        for at in range(array.type.num_fields):
            yield from _data_of_cells(array.field(at))
    elif is_list(array.type):
        yield from _data_of_cells(array.values)
    elif pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        data = array.buffers()[2]
        if data is not None:
            yield data.address


def _check_uncompressed(data: bytes, batch: _Message, max_bytes: int) -> None:
    """Check the sizes of the buffers of a compressed batch. Each buffer begins with its size. Raises DatasetError if
    they are too large together."""
    if not batch.is_compressed:
        return
    header, body = data[8 : batch.nbytes - batch.body_bytes], data[batch.nbytes - batch.body_bytes :]
    message = _table_at(header, 0)
    record = _table_at(header, message + _slot(header, message, 2))
    vector = _table_at(header, record + _slot(header, record, 2))
    total = 0
    for at in range(int(_unpack(header, vector, "<I"))):
        offset, nbytes = struct.unpack_from("<qq", header, vector + 4 + 16 * at)
        if nbytes >= 8 and 0 <= offset <= len(body) - 8:
            total += max(nbytes, struct.unpack_from("<q", body, offset)[0])
    if total > max_bytes:
        raise DatasetError(
            f"a batch takes {total} bytes once it is decompressed; wanted at most {max_bytes}: write the file with "
            "fewer rows per batch (writer_batch_size=100)"
        )


def _parse_header(data: bytes) -> tuple[int, int, int, bool]:
    """Return the kind, rows, body bytes and compression of a message: four fields of Arrow's Message flatbuffer."""
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
    """Return the place of a field in its flatbuffer table; 0 if the field is left out."""
    vtable = table - _unpack(data, table, "<i")
    return _unpack(data, vtable + 4 + 2 * field, "<H") if 4 + 2 * field < _unpack(data, vtable, "<H") else 0


def _field(data: bytes, table: int, field: int, kind: str) -> int:
    slot = _slot(data, table, field)
    return _unpack(data, table + slot, kind) if slot else 0


def _unpack(data: bytes, at: int, kind: str) -> int:
    if at < 0:
        raise IndexError(f"a field at {at}")
    return int(struct.unpack_from(kind, data, at)[0])
