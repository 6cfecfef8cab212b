"""The checks that an object is the one that a ref names, and that received bytes are the ones that were announced.

Each check raises ChecksumError with what was found and what the ref says.
"""

from collections.abc import Sequence

from dataplane.core.arrays import check_array
from dataplane.core.errors import ChecksumError, DataPlaneError
from dataplane.core.refs import Ref


def check_claim(ref: Ref, there: Ref) -> None:
    """Check that `ref` means the same bytes as `there`, the object that now has its name."""
    check_version(ref, there.version)
    claimed = ref.meta.get("checksum")
    if ref.kind == "derived" and claimed is not None and claimed != there.meta.get("checksum"):
        raise ChecksumError(
            f"{ref.name} was made again with checksum {there.meta.get('checksum')}, before it was {claimed}; "
            "its kernel or Pillow changed: start with fresh refs"
        )


def check_version(ref: Ref, version: int) -> None:
    """Check that the object that now has the ref's name has the ref's version. A ref with version 0 names any."""
    if ref.version not in (0, version):
        raise ChecksumError(
            f"{ref.name} was released and written again since its ref was given out (version {version}, "
            f"the ref says {ref.version}): get a fresh ref"
        )


def check_layout(ref: Ref, dtype: str, shape: Sequence[int], nbytes: int) -> None:
    """Check that an object has the dtype, shape and size of its ref."""
    if (dtype, tuple(shape), nbytes) != (ref.dtype, ref.shape, ref.nbytes):
        raise ChecksumError(
            f"{ref.name} is {dtype} {list(shape)} of {nbytes} bytes, its ref says {ref.dtype} "
            f"{str(list(ref.shape))[:200]} of {ref.nbytes}: the name was released and used again, or the ref was "
            "edited; get a fresh ref"
        )


def check_sent(sent: object, digest: str, wanted: Ref) -> Ref:
    """Check a sender's description of an object against the wanted ref; return the sent ref.

    `digest` is the announced digest of the bytes: it must be the one in the object's name or ref.
    """
    try:
        there = sent if isinstance(sent, Ref) else Ref.from_dict(sent)  # type: ignore[arg-type]  # from_dict checks
    except ValueError as error:
        raise DataPlaneError(f"{wanted.name} came with a description that is not a ref: {error}") from error
    check_array(there.dtype, there.shape, there.nbytes)
    if (there.name, there.kind) != (wanted.name, wanted.kind):
        raise ChecksumError(f"{there.kind} object {there.name} came instead of {wanted.kind} {wanted.name}")
    if there.kind == "source" and digest != there.name.removeprefix("s/"):
        raise ChecksumError(f"{there.name} came with digest {digest}, which is not the one in its name")
    if there.kind == "derived" and digest != there.meta.get("checksum", digest):
        raise ChecksumError(f"{there.name} came with digest {digest}; its ref says {there.meta['checksum']}")
    return there


def check_digest(ref: Ref, found: str, announced: str) -> None:
    """Check that the digest of the received bytes is the one that the sender announced."""
    if found != announced:
        raise ChecksumError(f"{ref.name} arrived with digest {found}; its sender announced {announced}")
