"""Splits the columns of a table into media and fields, from the schema alone.

Media are: Hugging Face's and verl's struct of `bytes` and `path` (alone or in a list); binary or text columns named
image, images, video or videos; and columns that the owner of the root declared. Other columns of bytes are refused: no
field can hold bytes, and leaving the column out silently would lose data.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from dataplane.core.errors import DatasetError

MEDIA_NAMES = ("image", "images", "video", "videos")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnOptions:
    """Which columns of a data set to read and how, as the owner of the node gave them."""

    media: frozenset[str] = frozenset()
    """The columns that hold media although their type does not show it."""
    drop: frozenset[str] = frozenset()
    """The columns that are not read."""
    optional: frozenset[str] = frozenset()
    """The columns of one medium that may be null; a sample with null has no medium there."""

    def to_dict(self) -> dict[str, list[str]]:
        """Return the options in JSON's types."""
        return {"media": sorted(self.media), "drop": sorted(self.drop), "optional": sorted(self.optional)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[str]]) -> "ColumnOptions":
        """Return the options that `to_dict` gave."""
        return cls(**{name: frozenset(names) for name, names in values.items()})


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a table, sorted by their use."""

    media: tuple[str, ...]
    fields: tuple[str, ...]
    optional: frozenset[str]
    """The media columns that may be null: all lists, and those that the root declares."""


def split_columns(schema: pa.Schema, options: ColumnOptions, path: str) -> Columns:
    """Return the columns of a schema, split into media and fields. Raises DatasetError for a column that cannot be
    served; the message says which option the root needs."""
    names = schema.names
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DatasetError(f"{path} has two columns named {repeated[0]!r}; give every column a name of its own")
    unknown = sorted((options.media | options.optional) - set(names))
    if unknown:
        raise DatasetError(
            f"{path} has no column {unknown[0]!r}, which the root names; it has {', '.join(names) or 'none'}"
        )
    features = _hugging_face_features(schema)
    media, fields = [], []
    for field in schema:
        if field.name in options.drop:
            continue
        if "Audio" in features.get(field.name, ""):
            raise DatasetError(f"{path}: column {field.name!r} holds audio, which no node serves; {_drop(field.name)}")
        if _is_media(field, options):
            media.append(field.name)
        elif _holds_bytes(field.type):
            raise DatasetError(
                f"{path}: column {field.name!r} ({field.type}) holds bytes, but nothing says that they are media; add "
                f"#media={field.name} to the end of its pattern if they are, or {_drop(field.name)}"
            )
        else:
            fields.append(field.name)
    lists = {name for name in media if is_list(schema.field(name).type)}
    return Columns(tuple(media), tuple(fields), options.optional | lists)


def is_list(kind: pa.DataType) -> bool:
    """Return True if cells of this type hold several values."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _drop(name: str) -> str:
    return f"#drop={name} to leave the column out"


def _is_media(field: pa.Field, options: ColumnOptions) -> bool:
    kind = _element(field.type)
    if pa.types.is_struct(kind):
        keys = {kind.field(at).name: kind.field(at).type for at in range(kind.num_fields)}
        if "bytes" in keys and is_bytes(keys["bytes"]):
            return set(keys) <= {"bytes", "path"} or _is_named(field.name, options)
        return _is_named(field.name, options) and _has_path(keys)
    return _is_named(field.name, options) and (is_bytes(kind) or _is_text(kind) or pa.types.is_null(kind))


def _is_named(name: str, options: ColumnOptions) -> bool:
    return name in MEDIA_NAMES or name in options.media


def _has_path(keys: Collection[str]) -> bool:
    return any(key in keys for key in ("path", "image", "video"))


def _element(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if is_list(kind) else kind


def is_bytes(kind: pa.DataType) -> bool:
    """Return True if cells of this type are bytes."""
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _holds_bytes(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _holds_bytes(kind.storage_type) and not str(kind).startswith("extension<arrow.uuid")
    if pa.types.is_dictionary(kind):
        return _holds_bytes(kind.value_type)
    return is_bytes(kind) or any(_holds_bytes(kind.field(at).type) for at in range(kind.num_fields))


def _hugging_face_features(schema: pa.Schema) -> dict[str, str]:
    """Return for each column the feature that `datasets` wrote for it, as JSON text; empty if it wrote nothing."""
    try:
        said = json.loads((schema.metadata or {})[b"huggingface"])
        return {name: json.dumps(feature) for name, feature in said["info"]["features"].items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
