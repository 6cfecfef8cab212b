"""Helpers for lineages: the ref of a source, and the error for an object that cannot be made again."""

from dataclasses import replace

from dataplane.core.digests import source_name
from dataplane.core.errors import MissingObjectError
from dataplane.core.refs import Lineage, Ref


def source_ref(lineage: Lineage, node_id: str) -> Ref:
    """Return the ref of the source from which an object with this lineage is made."""
    return Ref(
        name=source_name(lineage.source),
        kind="source",
        dtype="uint8",
        shape=(lineage.nbytes,),
        nbytes=lineage.nbytes,
        node=node_id,
        lineage=replace(lineage, recipe=None),
    )


def missing_object_error(name: str, node_id: str) -> MissingObjectError:
    """Return the error for an object that its own node does not have and that cannot be made again."""
    return MissingObjectError(
        f"{name} is not on node {node_id}: a plain object is lost when it is released or its node stops; put it again"
    )
