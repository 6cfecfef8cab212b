"""Refs of derived objects, built from their lineage, and the check that a ref from a client agrees with its lineage."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dataplane.core.digests import derived_name, source_name
from dataplane.core.errors import BadRequestError
from dataplane.core.lineage import missing_object_error, source_ref
from dataplane.core.refs import Ref
from dataplane.media.recipes import parse_recipe


def derived_ref(source: Ref, recipe: Mapping[str, Any], node_id: str) -> Ref:
    """Return the ref of a derived object that is not made yet, so its shape is not known. A `source` that is itself
    derived is replaced by its own source."""
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


def checked_ref(ref: Ref, node_id: str) -> Ref:
    """Build a client's ref again from its lineage, and check that its name follows from the lineage.

    Only the checksum is kept from the client's ref: it says which bytes the client expects.
    """
    lineage = ref.lineage
    if ref.kind == "plain" or lineage is None:
        raise missing_object_error(ref.name, node_id)
    rebuilt = source_ref(lineage, node_id)
    if lineage.recipe is not None:
        rebuilt = derived_ref(rebuilt, parse_recipe(lineage.recipe).to_dict(), node_id)
    if (ref.name, ref.kind) != (rebuilt.name, rebuilt.kind):
        raise BadRequestError(f"{ref.name} does not match its lineage, which makes {rebuilt.name}; refs are not edited")
    checksum = ref.meta.get("checksum") if ref.kind == "derived" else None
    return rebuilt if checksum is None else replace(rebuilt, meta={"checksum": checksum})
