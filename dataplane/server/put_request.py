"""A writer's request to store bytes, read from JSON and checked. DoPut and the put in place share it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow.flight as fl

from dataplane.core.arrays import ITEM_BYTES, MAX_NUMBER, check_array, check_shape
from dataplane.core.errors import BadRequestError
from dataplane.core.json_body import (
    MAX_META_BYTES,
    ONE_OBJECT_BYTES,
    check_plain_name,
    dump,
    parse,
    take,
    take_timeout_s,
)
from dataplane.core.refs import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PutRequest:
    """A checked request to store bytes."""

    kind: Kind
    name: str
    """The name of the object. It is empty for a source, which is named by its digest."""
    dtype: str | None
    """The dtype of the object. None takes the dtype of the received column."""
    shape: tuple[int, ...] | None
    nbytes: int | None
    meta: Mapping[str, Any]
    checksum: str
    """The checksum that the writer computed over its bytes; empty if it computed none."""
    timeout_s: float
    scope: str | None = None
    """The open scope that the object will belong to."""
    is_durable: bool = False
    """True if the object must have a file on disk before it is acknowledged."""
    is_synced: bool = True
    """False if the system may write that file later."""
    is_hashed: bool = True
    """False if the writer asks the node not to hash a plain object."""

    @property
    def announced_bytes(self) -> int | None:
        """The number of bytes that will come, if the writer announced it."""
        if self.nbytes is None and self.shape is not None and self.dtype is not None:
            return math.prod(self.shape) * ITEM_BYTES[self.dtype]
        return self.nbytes

    @classmethod
    def from_descriptor(cls, descriptor: fl.FlightDescriptor) -> "PutRequest":
        """Return the request in a Flight descriptor: a path (its only part is the name) or a JSON command."""
        if descriptor.descriptor_type == fl.DescriptorType.PATH:
            if len(descriptor.path) != 1:
                raise BadRequestError(f"a path of {len(descriptor.path)} parts; wanted one: the object's name")
            return cls.from_body({"name": descriptor.path[0].decode("utf-8", "replace")})
        return cls.from_body(parse(descriptor.command, "the descriptor of DoPut", ONE_OBJECT_BYTES))

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> "PutRequest":
        """Read the request from a JSON object: kind, name, dtype, shape, nbytes, meta, checksum, timeout_s, scope,
        durable, hash."""
        kind = take(body, "put", "kind", str, default="plain")
        if kind not in ("plain", "source"):
            raise BadRequestError(f"put.kind is {kind!r}; wanted plain or source (derived objects are made by derive)")
        name = take(body, "put", "name", str, default="")
        if kind == "plain":
            check_plain_name(name)
        dtype = take(body, "put", "dtype", str, type(None), default=None)
        if dtype is not None:
            check_array(dtype, (), ITEM_BYTES.get(dtype, 0))
        shape = take(body, "put", "shape", list, type(None), default=None)
        nbytes = take(body, "put", "nbytes", int, type(None), default=None)
        if nbytes is not None and not 0 <= nbytes < MAX_NUMBER:
            raise BadRequestError(f"put.nbytes is {str(nbytes)[:40]}; wanted 0 or more, in 64 bits")
        if shape is not None:
            check_shape(shape, "put.shape")
            if math.prod(shape) >= MAX_NUMBER:
                raise BadRequestError(f"put.shape is {str(shape)[:80]}; no array has so many elements")
        meta = take(body, "put", "meta", dict, type(None), default=None) or {}
        if meta and len(dump(meta)) > MAX_META_BYTES:
            raise BadRequestError(f"put.meta has {len(dump(meta))} bytes; wanted at most {MAX_META_BYTES}")
        durable = take(body, "put", "durable", bool, str, default=False)
        if isinstance(durable, str) and durable != "unsynced":
            raise BadRequestError(f'put.durable is {durable[:40]!r}; wanted true, false or "unsynced"')
        return cls(
            kind=kind,
            name="" if kind == "source" else name,
            dtype="uint8" if kind == "source" else dtype,
            shape=None if kind == "source" or shape is None else tuple(shape),
            nbytes=nbytes,
            meta=meta,
            checksum=take(body, "put", "checksum", str, default=""),
            timeout_s=take_timeout_s(body, "put"),
            scope=take(body, "put", "scope", str, type(None), default=None),
            is_durable=durable is not False,
            is_synced=durable != "unsynced",
            is_hashed=take(body, "put", "hash", bool, default=True),
        )
