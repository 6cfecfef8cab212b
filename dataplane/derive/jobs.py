"""The jobs of decode workers, made from the lineage of the wanted object."""

from dataclasses import replace

from dataplane.core.refs import Lineage
from dataplane.datasets.formats.shard import MediumLocation
from dataplane.derive.worker_handle import Job


def file_job(lineage: Lineage, place: MediumLocation, data: bytes | None) -> Job:
    """Return the job for a worker that gets the bytes of its source, or reads them from a local shard if `data` is
    None."""
    label = f"{lineage.shard} {place.key}"
    job = source_job(lineage, label, place.file.path, place.offset, place.nbytes, place.formats)
    return replace(job, no_links=place.file.no_links, data=data)


def source_job(
    lineage: Lineage,
    label: str,
    path: str | None,
    offset: int,
    nbytes: int,
    formats: tuple[str, ...],
    data: memoryview | None = None,
) -> Job:
    """Return the job for a worker that reads its source from a file, or gets the bytes that the arena has."""
    assert lineage.recipe is not None
    return Job(
        label=label,
        path=path,
        offset=offset,
        nbytes=nbytes,
        digest=lineage.source,
        formats=formats,
        recipe=lineage.recipe,
        data=data,
    )
