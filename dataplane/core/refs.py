"""Refs and the other small records that processes exchange instead of pixels: lineage, sample, data set, bad medium.

All classes here are immutable and picklable, and `to_dict` / `from_dict` convert them to and from JSON-safe values.
This module uses only the standard library.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

from dataplane.core.arrays import MAX_NUMBER, check_array
from dataplane.core.typed_fields import Types, read_fields, take_field

Kind = Literal["source", "derived", "plain"]
"""The type of the kind of an object, which is one of `KINDS`."""
KINDS: tuple[Kind, ...] = ("source", "derived", "plain")
"""The kinds of objects: encoded media, objects that a recipe makes of media, and what a client or writer stored under a
name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The origin of an object, from which any node with the same data sets can make the object again."""

    dataset: str
    """The name of a data set that is registered at the node; empty for a source that a client stored with
    `put_source`."""
    shard: str
    """The name of the file inside the data set."""
    offset: int
    """The position of the source in the file: for a tar the byte at which its encoded bytes begin, for a table or JSON
    lines the number of the row."""
    nbytes: int
    """The number of encoded bytes of the source."""
    source: str
    """The digest of the source's bytes (the hex part of its name)."""
    recipe: Mapping[str, Any] | None
    """The recipe that makes the object from the source; None for the source itself."""
    part: str = ""
    """The medium of the row, as column and position, such as `images/1`; empty in a tar."""

    def to_dict(self) -> dict[str, Any]:
        """Return the lineage as JSON-safe values."""
        return {
            "dataset": self.dataset,
            "shard": self.shard,
            "offset": self.offset,
            "nbytes": self.nbytes,
            "source": self.source,
            "recipe": None if self.recipe is None else dict(self.recipe),
            "part": self.part,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Lineage":
        """Return the lineage that `to_dict` wrote. Raises ValueError that names a field if it is missing, of the wrong
        type, or a number that no file has."""
        fields = read_fields(data, "lineage", _LINEAGE_FIELDS, _LINEAGE_DEFAULTS)
        for key in ("offset", "nbytes"):
            if not 0 <= fields[key] < MAX_NUMBER:
                raise _no_number(fields[key], f"lineage.{key}")
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A record of a few hundred bytes that names and describes one immutable object of the data plane."""

    name: str
    """The name of the object. Source: `s/<32 hex digits>`. Derived: `d/<source's 32>/<recipe's 16 digits>`. Plain: what
    the client chose."""
    kind: Kind
    dtype: str
    """The numpy name of the dtype."""
    shape: tuple[int, ...]
    nbytes: int
    node: str
    """The id of the node that issued the ref. Any node with the same data sets can make the object from its lineage."""
    lineage: Lineage | None
    """The origin of the object; None if the object cannot be made again."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """JSON-safe facts about the object. Derived objects have `medium` (`image` or `video`); sources of a data set have
    it too, from their file names. Derived patches also have `grid_thw` (for images [1, h, w]), `num_tokens`, and the
    `checksum` of their content."""
    version: int = 0
    """The version of a plain object, which tells it from earlier objects of the same name; 0 for other kinds."""

    def __hash__(self) -> int:
        return hash(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the ref as JSON-safe values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "node": self.node,
            "lineage": None if self.lineage is None else self.lineage.to_dict(),
            "meta": dict(self.meta),
            "version": self.version,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Ref":
        """Return the ref that `to_dict` wrote. Raises ValueError that names a field if it is missing, of the wrong
        type, or impossible: a size that does not fit dtype and shape, or a number that does not fit 63 bits."""
        fields = read_fields(data, "ref", _REF_FIELDS, _REF_DEFAULTS)
        if fields["kind"] not in KINDS:
            raise ValueError(f"ref.kind is {fields['kind']!r}; wanted one of {', '.join(KINDS)}")
        fields["shape"] = check_array(fields["dtype"], fields["shape"], fields["nbytes"], "ref.")
        if not 0 <= fields["version"] < MAX_NUMBER:
            raise _no_number(fields["version"], "ref.version")
        if fields["lineage"] is not None:
            fields["lineage"] = Lineage.from_dict(fields["lineage"])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """The description of an array that is to be stored as a plain object: its name, dtype, shape and meta."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMedia:
    """A medium or a part of a shard that cannot be used, and the reason."""

    dataset: str
    """The name of the data set; empty for a source that a client stored with `put_source`."""
    shard: str
    key: str
    """The key of the sample in its shard; empty if it is not known. In a table, the medium's part (`images/1`)
    follows."""
    reason: str
    """The reason why the medium cannot be used, as text for people."""
    name: str = ""
    """The name of the object that could not be made; empty if even the source could not be read, so that no name is
    known."""
    offset: int = -1
    """The position in the shard, as in `Lineage.offset`; -1 if it is not known."""

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-safe values."""
        return {
            "dataset": self.dataset,
            "shard": self.shard,
            "key": self.key,
            "reason": self.reason,
            "name": self.name,
            "offset": self.offset,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "BadMedia":
        """Return the record that `to_dict` wrote. Raises ValueError that names a field if it is missing or of the wrong
        type."""
        texts = {key: take_field(data, "bad media", key, str) for key in ("dataset", "shard", "key", "reason", "name")}
        return cls(**texts, offset=take_field(data, "bad media", "offset", int))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a data set: the members of a tar that share a key, a row of a table, or a line of JSON lines."""

    index: int
    """The position in the data set. Shards are in the order of their names, samples in the order of their shard."""
    key: str
    """The key of the sample in its shard: the common name of tar members, `row 3` of a table, `line 3` of JSON
    lines."""
    shard: str
    """The name of the file inside the data set."""
    fields: Mapping[str, Any]
    """The JSON-safe fields of the sample. Tar: the content of the `.json` member. Other formats: the columns or keys
    that are not media."""
    media: tuple[Ref, ...]
    """The source refs of the media, in the order of tar members, columns or keys. `lineage.part` names the column. The
    media are not decoded yet."""
    bad: tuple[BadMedia, ...] = ()
    """The parts of the sample that cannot be read: a `.json` that is not JSON, a null image, a path without a file."""

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON-safe values."""
        return {
            "index": self.index,
            "key": self.key,
            "shard": self.shard,
            "fields": dict(self.fields),
            "media": [ref.to_dict() for ref in self.media],
            "bad": [bad.to_dict() for bad in self.bad],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Sample":
        """Return the sample that `to_dict` wrote. Raises ValueError that names a field if it is missing or of the wrong
        type."""
        return cls(
            index=take_field(data, "sample", "index", int),
            key=take_field(data, "sample", "key", str),
            shard=take_field(data, "sample", "shard", str),
            fields=take_field(data, "sample", "fields", dict),
            media=tuple(Ref.from_dict(ref) for ref in take_field(data, "sample", "media", list)),
            bad=tuple(BadMedia.from_dict(bad) for bad in take_field(data, "sample", "bad", list)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The result of ingesting a registered data set: its number of samples, its number of shards, and its bad parts."""

    name: str
    num_samples: int
    num_shards: int
    """The number of shard files."""
    bad: tuple[BadMedia, ...]
    """The damaged shards and unusable members. The samples around them are counted and can be read."""

    def to_dict(self) -> dict[str, Any]:
        """Return the data set as JSON-safe values."""
        return {
            "name": self.name,
            "num_samples": self.num_samples,
            "num_shards": self.num_shards,
            "bad": [bad.to_dict() for bad in self.bad],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Dataset":
        """Return the data set that `to_dict` wrote. Raises ValueError that names a field if it is missing or of the
        wrong type."""
        return cls(
            name=take_field(data, "dataset", "name", str),
            num_samples=take_field(data, "dataset", "num_samples", int),
            num_shards=take_field(data, "dataset", "num_shards", int),
            bad=tuple(BadMedia.from_dict(bad) for bad in take_field(data, "dataset", "bad", list)),
        )


def _no_number(number: int, what: str) -> ValueError:
    """Return the error about a number that is negative or does not fit 63 bits."""
    return ValueError(f"{what} is {str(number)[:40]}; wanted 0 or more, in 63 bits")


_LINEAGE_FIELDS: Mapping[str, Types] = {
    "recipe": (dict, NoneType),
    "dataset": (str,),
    "shard": (str,),
    "offset": (int,),
    "nbytes": (int,),
    "source": (str,),
    "part": (str,),
}
_LINEAGE_DEFAULTS = {"part": ""}
_REF_FIELDS: Mapping[str, Types] = {
    "kind": (str,),
    "name": (str,),
    "dtype": (str,),
    "shape": (list, tuple),
    "nbytes": (int,),
    "node": (str,),
    "lineage": (dict, NoneType),
    "meta": (dict,),
    "version": (int,),
}
_REF_DEFAULTS = {"version": 0}
