"""What travels instead of pixels: refs, and the few records that name samples, datasets and bad media.

Standard library only. Everything here is immutable, picklable and JSON-safe (`to_dict` / `from_dict`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal

Kind = Literal["source", "derived", "plain"]
KINDS: tuple[Kind, ...] = ("source", "derived", "plain")
MAX_DIMS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """How an object can be made again when a node lost it."""

    dataset: str
    """Id of a dataset that the node's owner registered; empty for a source that somebody put by hand."""
    shard: str
    """Name of the file inside the dataset."""
    offset: int
    """Where the source's encoded bytes begin in a tar; the row's number in a table or in JSON lines."""
    nbytes: int
    """How many encoded bytes there are."""
    source: str
    """Digest of the source bytes (the hex part of its name)."""
    recipe: Mapping[str, Any] | None
    """What was done to the source; None for the source itself."""
    part: str = ""
    """Which medium of a row: column and place, such as `images/1`; empty in a tar."""

    def to_dict(self) -> dict[str, Any]:
        """The lineage as JSON-safe values."""
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
        """The reverse of `to_dict`; ValueError names the field that is missing or of the wrong type."""
        return cls(**_read(data, "lineage", _LINEAGE_FIELDS, _LINEAGE_DEFAULTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A few hundred bytes that name one immutable object of the data plane."""

    name: str
    """`s/<blake3 hex 32>` source, `d/<source hex>/<recipe hex 16>` derived, plain: what its writer chose."""
    kind: Kind
    dtype: str
    """A numpy dtype name."""
    shape: tuple[int, ...]
    nbytes: int
    node: str
    """Id of the node that gave the ref out; any node with the same datasets can make it again from its lineage."""
    lineage: Lineage | None
    meta: Mapping[str, Any] = field(default_factory=dict)
    """JSON-safe. `medium` (image or video) of derived objects, and of a data set's sources by their names; of derived
    patches also `grid_thw` (images: [1, h, w]), `num_tokens`, and `checksum` of the content."""
    version: int = 0
    """Of a plain object, which one of all that had its name; 0 where the name follows from the content."""

    def __hash__(self) -> int:
        return hash(self.name)

    def to_dict(self) -> dict[str, Any]:
        """The ref as JSON-safe values."""
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
        """The reverse of `to_dict`; ValueError names the field that is missing or of the wrong type."""
        fields = _read(data, "ref", _REF_FIELDS, _REF_DEFAULTS)
        if fields["kind"] not in KINDS:
            raise ValueError(f"ref.kind is {fields['kind']!r}; wanted one of {', '.join(KINDS)}")
        check_shape(fields["shape"], "ref.shape")
        fields["shape"] = tuple(fields["shape"])
        if fields["lineage"] is not None:
            fields["lineage"] = Lineage.from_dict(fields["lineage"])
        return cls(**fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """An array that is to be stored as a plain object."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BadMedia:
    """A medium, or a piece of a shard, that was put in quarantine, and why."""

    dataset: str
    shard: str
    key: str
    reason: str
    name: str = ""
    """Name of the object that could not be made; empty where not even the source has a name."""
    offset: int = -1
    """Where in the shard; -1 where that is not known."""

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON-safe values."""
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
        """The reverse of `to_dict`."""
        texts = {key: _take(data, "bad media", key, str) for key in ("dataset", "shard", "key", "reason", "name")}
        return cls(**texts, offset=_take(data, "bad media", "offset", int))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample: the members of a tar that share a key, a row of a table, a line of JSON lines."""

    index: int
    """Place in the dataset: shards in name order, samples in the order of their shard."""
    key: str
    shard: str
    fields: Mapping[str, Any]
    """The `.json` member of a tar, the columns or keys that are not media of the others; JSON-safe."""
    media: tuple[Ref, ...]
    """Source refs of the media in tar, column or key order; `lineage.part` says which column. Nothing is decoded."""
    bad: tuple[BadMedia, ...] = ()
    """What of the sample cannot be read: a `.json` that is not JSON, a null image, a path that leads nowhere."""

    def to_dict(self) -> dict[str, Any]:
        """The sample as JSON-safe values."""
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
        """The reverse of `to_dict`."""
        return cls(
            index=_take(data, "sample", "index", int),
            key=_take(data, "sample", "key", str),
            shard=_take(data, "sample", "shard", str),
            fields=_take(data, "sample", "fields", dict),
            media=tuple(Ref.from_dict(ref) for ref in _take(data, "sample", "media", list)),
            bad=tuple(BadMedia.from_dict(bad) for bad in _take(data, "sample", "bad", list)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What ingest found in a registered root."""

    name: str
    num_samples: int
    num_shards: int
    bad: tuple[BadMedia, ...]
    """Torn shards and unusable members; the samples around them are counted and served."""

    def to_dict(self) -> dict[str, Any]:
        """The dataset as JSON-safe values."""
        return {
            "name": self.name,
            "num_samples": self.num_samples,
            "num_shards": self.num_shards,
            "bad": [bad.to_dict() for bad in self.bad],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Dataset":
        """The reverse of `to_dict`."""
        return cls(
            name=_take(data, "dataset", "name", str),
            num_samples=_take(data, "dataset", "num_samples", int),
            num_shards=_take(data, "dataset", "num_shards", int),
            bad=tuple(BadMedia.from_dict(bad) for bad in _take(data, "dataset", "bad", list)),
        )


def check_shape(shape: Sequence[object], what: str = "shape") -> None:
    """ValueError unless an array can have this shape."""
    if len(shape) > MAX_DIMS:
        raise ValueError(f"{what} has {len(shape)} dimensions; wanted at most {MAX_DIMS}")
    for dim in shape:
        if type(dim) is not int or not 0 <= dim < 1 << 63:
            found = str(list(shape))[:80]
            raise ValueError(f"{what} is {found}; wanted numbers that are not negative and fit 64 bits")


_Types = tuple[type, ...]

_LINEAGE_FIELDS: Mapping[str, _Types] = {
    "recipe": (dict, NoneType),
    "dataset": (str,),
    "shard": (str,),
    "offset": (int,),
    "nbytes": (int,),
    "source": (str,),
    "part": (str,),
}
_LINEAGE_DEFAULTS = {"part": ""}
_REF_FIELDS: Mapping[str, _Types] = {
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


def _read(
    data: Mapping[str, Any], what: str, fields: Mapping[str, _Types], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """All `fields` of a JSON object; refs come by the thousand, so the good case is a look at each type."""
    read = {}
    for key, types in fields.items():
        try:
            value = data[key]
        except (KeyError, TypeError):
            value = defaults.get(key, _MISSING)
        read[key] = value if type(value) in types else _take(data, what, key, *types)
    return read


_MISSING = object()


def _take(data: Mapping[str, Any], what: str, key: str, *types: type) -> Any:
    """data[key] if it is one of `types` (a bool is not an int here)."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is {type(data).__name__}; wanted a JSON object")
    if key not in data:
        raise ValueError(f"{what}.{key} is missing; found only {', '.join(sorted(data)) or 'nothing'}")
    value = data[key]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise ValueError(f"{what}.{key} is {str(value)[:80]!r} ({type(value).__name__}); wanted {wanted}")
    return value
