"""Helpers for refs and lineages: make the ref of a source, and check that a ref matches the object of its name."""

from dataclasses import replace

from dataplane.core.digests import source_name
from dataplane.core.errors import ChecksumError, MissingObjectError
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


def check_claim(ref: Ref, there: Ref) -> None:
    """Check that `ref` means the same bytes as `there`, the object that now has its name. Raises ChecksumError if
    not."""
    if ref.version not in (0, there.version):
        raise ChecksumError(
            f"{ref.name} was released and written again since its ref was given out (version {there.version}, "
            f"the ref says {ref.version}): get a fresh ref"
        )
    claimed = ref.meta.get("checksum")
    if ref.kind == "derived" and claimed is not None and claimed != there.meta.get("checksum"):
        raise ChecksumError(
            f"{ref.name} was made again with checksum {there.meta.get('checksum')}, before it was {claimed}; "
            "its kernel or Pillow changed: start with fresh refs"
        )
