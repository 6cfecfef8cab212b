"""What follows from a lineage alone: the ref of a source, and whether a ref claims the bytes that are there."""

from dataclasses import replace

from dataplane.core.digests import source_name
from dataplane.core.errors import ChecksumError, MissingObjectError
from dataplane.core.refs import Lineage, Ref


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


def gone(name: str, node_id: str) -> MissingObjectError:
    """What to raise for an object that its home does not have, and that nobody can make."""
    return MissingObjectError(
        f"{name} is not on node {node_id}: a plain object is lost when it is released or its node stops; put it again"
    )


def check_claim(ref: Ref, there: Ref) -> None:
    """Raise ChecksumError where a ref claims other bytes than those of the object of its name."""
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
