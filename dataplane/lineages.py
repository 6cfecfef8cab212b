"""Refs and jobs that follow from a lineage; refs that somebody sent are believed only if they do."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dataplane.datasets import Place
from dataplane.digests import derived_name, source_name
from dataplane.errors import BadRequestError, ChecksumError, MissingObjectError
from dataplane.pool_process import Job
from dataplane.recipes import parse_recipe
from dataplane.refs import Lineage, Ref


def derived_ref(source: Ref, recipe: Mapping[str, Any], node_id: str) -> Ref:
    """The name of what will be made; its shape is not known yet. A derived ref stands for its source."""
    lineage = source.lineage
    if source.kind == "plain" or lineage is None:
        raise BadRequestError(f"{source.name} is a {source.kind} object; derive works on refs of media")
    if source.kind == "derived":
        source = source_ref(lineage, source.node)
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


def checked_ref(ref: Ref, node_id: str) -> Ref:
    """What a ref that somebody sent stands for, built anew from its lineage, from which its name must follow.

    Of the rest only the checksum is kept: what its bearer claims the bytes are.
    """
    lineage = ref.lineage
    if ref.kind == "plain" or lineage is None:
        raise gone(ref.name, node_id)
    rebuilt = source_ref(lineage, node_id)
    if lineage.recipe is not None:
        rebuilt = derived_ref(rebuilt, parse_recipe(lineage.recipe).model_dump(), node_id)
    if (ref.name, ref.kind) != (rebuilt.name, rebuilt.kind):
        raise BadRequestError(f"{ref.name} does not match its lineage, which makes {rebuilt.name}; refs are not edited")
    checksum = ref.meta.get("checksum") if ref.kind == "derived" else None
    return rebuilt if checksum is None else replace(rebuilt, meta={"checksum": checksum})


def gone(name: str, node_id: str) -> MissingObjectError:
    """What to raise for an object that its home does not have, and that nobody can make."""
    return MissingObjectError(
        f"{name} is not on node {node_id}: a plain object is lost when it is released or its node stops; put it again"
    )


def check_claim(ref: Ref, there: Ref) -> None:
    """Raise ChecksumError where a ref claims other bytes than those of the object of its name."""
    if ref.generation not in (0, there.generation):
        raise ChecksumError(
            f"{ref.name} was released and written again since its ref was given out (generation {there.generation}, "
            f"the ref says {ref.generation}): get a fresh ref"
        )
    claimed = ref.meta.get("checksum")
    if ref.kind == "derived" and claimed is not None and claimed != there.meta.get("checksum"):
        raise ChecksumError(
            f"{ref.name} was made again with checksum {there.meta.get('checksum')}, before it was {claimed}; "
            "its kernel or Pillow changed: start with fresh refs"
        )


def file_job(lineage: Lineage, place: Place) -> Job:
    """The job of a worker that reads its source from a local shard."""
    label = f"{lineage.shard} {place.key}"
    job = source_job(lineage, label, place.file.path, place.offset, place.nbytes, place.formats)
    return replace(job, no_links=place.file.no_links)


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
