"""Refs and jobs that follow from a lineage; refs that somebody sent are believed only if they do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dataplane.datasets import Place
from dataplane.digests import derived_name, source_name
from dataplane.errors import BadRequestError, MissingObjectError
from dataplane.pool import Job
from dataplane.recipes import parse_recipe
from dataplane.refs import Lineage, Ref


def derived_ref(source: Ref, recipe: Mapping[str, Any], node_id: str) -> Ref:
    """The name of what will be made; its shape is not known yet."""
    lineage = source.lineage
    if source.kind != "source" or lineage is None:
        raise BadRequestError(f"{source.name} is a {source.kind} object; derive works on source refs")
    if source.name != source_name(lineage.source):
        raise BadRequestError(
            f"{source.name} does not match its lineage (source {lineage.source}); refs are not edited"
        )
    return Ref(
        name=derived_name(lineage.source, recipe),
        kind="derived",
        dtype="uint8",
        shape=(0,),
        nbytes=0,
        node=node_id,
        lineage=replace(lineage, recipe=dict(recipe)),
    )


def source_ref(lineage: Lineage, node_id: str) -> Ref:
    """The ref of the source that a lineage begins with."""
    return Ref(
        name=source_name(lineage.source),
        kind="source",
        dtype="uint8",
        shape=(lineage.nbytes,),
        nbytes=lineage.nbytes,
        node=node_id,
        lineage=replace(lineage, recipe=None),
    )


def checked_ref(ref: Ref) -> Ref:
    """A ref that somebody sent and that may be made again: its name must follow from its lineage."""
    lineage = ref.lineage
    if ref.kind == "plain" or lineage is None:
        raise MissingObjectError(
            f"{ref.name} is not on this node: a plain object is lost when it is released or its node stops"
        )
    if lineage.recipe is None:
        expected = source_name(lineage.source)
    else:
        expected = derived_name(lineage.source, parse_recipe(lineage.recipe).model_dump())
    if ref.name != expected or (ref.kind == "derived") != (lineage.recipe is not None):
        raise BadRequestError(f"{ref.name} does not match its lineage, which makes {expected}; refs are not edited")
    return ref


def file_job(lineage: Lineage, place: Place) -> Job:
    """The job of a worker that reads its source from a local shard."""
    label = f"{lineage.shard} {place.key}"
    return source_job(lineage, label, place.file.path, place.offset, place.nbytes, place.formats)


def source_job(
    lineage: Lineage,
    label: str,
    path: str | None,
    offset: int,
    nbytes: int,
    formats: tuple[str, ...],
) -> Job:
    """The job of a worker that reads its source from a file, or from the arena where `path` is None."""
    assert lineage.recipe is not None
    return Job(
        label=label,
        path=path,
        offset=offset,
        nbytes=nbytes,
        digest=lineage.source,
        formats=formats,
        recipe=lineage.recipe,
    )
