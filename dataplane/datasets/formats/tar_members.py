"""The members of a tar, as samples: arrays of their places, which a parser sends to the node."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.datasets.formats.parser import Reply, json_of, wrong_reply
from dataplane.datasets.formats.range_files import RangeFile
from dataplane.datasets.formats.shard import MAX_MEDIUM_BYTES, Flaw
from dataplane.media.kinds import MEDIA_FORMATS

KINDS = {"offsets": np.int64, "sizes": np.int64, "paths": np.uint8, "path_ends": np.int64, "starts": np.int64}
ARRAYS = tuple(KINDS)
"""The arrays of an index."""


@dataclass(frozen=True, slots=True)
class TarMember:
    """A regular file inside a tar."""

    path: str
    offset: int
    """The offset of its bytes, after its header."""
    nbytes: int

    @property
    def key(self) -> str:
        """The WebDataset key: the folder, and the file name up to its first dot."""
        folder, slash, name = self.path.rpartition("/")
        return folder + slash + name.partition(".")[0]

    @property
    def extension(self) -> str:
        """The text after the first dot of the file name, in lower case."""
        return self.path.rpartition("/")[2].partition(".")[2].lower()


def formats_of(member: TarMember) -> tuple[str, ...] | None:
    """Return the formats that a media member may have; None for members that are not media."""
    return MEDIA_FORMATS.get(member.extension.rpartition(".")[2])


def refusal(member: TarMember) -> str:
    """Return the reason why a member cannot be used, or an empty string."""
    if member.nbytes <= MAX_MEDIUM_BYTES or formats_of(member) is None:
        return ""
    return f"{member.nbytes} encoded bytes; wanted at most {MAX_MEDIUM_BYTES}"


class TarIndex:
    """The samples of one tar, and its flaws. One member takes about 30 bytes and its path."""

    def __init__(self, arrays: Mapping[str, np.ndarray], flaws: Sequence[Flaw] = ()) -> None:
        """`arrays`: those of `arrays` of an index. Raises KeyError if one is missing."""
        self.flaws = tuple(flaws)
        self.arrays = {name: arrays[name] for name in ARRAYS}
        """The members of all samples: `offsets`, `sizes` and `path_ends` of each, `paths` of all one after another
        (uint8), and in `starts` the number of the first member of each sample."""
        self._offsets, self._sizes, self._paths, self._path_ends, self._starts = self.arrays.values()

    @property
    def num_samples(self) -> int:
        """The number of groups of members that share a key."""
        return len(self._starts) - 1

    @property
    def num_members(self) -> int:
        """The number of members of all samples."""
        return len(self._offsets)

    def sample(self, number: int) -> list[tuple[int, TarMember]]:
        """Return the members of a sample in tar order, with the number of each in the tar."""
        return [(at, self._member(at)) for at in range(int(self._starts[number]), int(self._starts[number + 1]))]

    def find(self, offset: int) -> TarMember | None:
        """Return the member whose bytes begin at `offset`."""
        at = int(np.searchsorted(self._offsets, offset))
        return self._member(at) if at < self.num_members and self._offsets[at] == offset else None

    def _member(self, at: int) -> TarMember:
        start = int(self._path_ends[at - 1]) if at else 0
        path = self._paths[start : int(self._path_ends[at])].tobytes().decode("utf-8", "surrogateescape")
        return TarMember(path, int(self._offsets[at]), int(self._sizes[at]))


def reply_of(index: TarIndex) -> Reply:
    """Return an index as a parser sends it."""
    flaws = [(flaw.offset, flaw.key, flaw.reason) for flaw in index.flaws]
    return Reply.of(flaws, [index.arrays[name].view(np.uint8).data for name in ARRAYS])


def index_of(file: RangeFile, reply: Reply) -> TarIndex:
    """Return the index that a parser sent. Raises DatasetError unless its members are ranges of the file, in order."""
    try:
        arrays = {name: np.frombuffer(buffer, KINDS[name]) for name, buffer in zip(ARRAYS, reply.buffers, strict=True)}
        flaws = [Flaw(int(offset), str(key), str(reason)) for offset, key, reason in json_of(file, reply)]
    except (ValueError, TypeError) as error:
        raise wrong_reply(file, f"an index: {error}") from error
    offsets, sizes, paths, path_ends, starts = arrays.values()
    is_right = (
        len(offsets) == len(sizes) == len(path_ends)
        and _rises(offsets, 0, file.nbytes)
        and _rises(offsets + sizes, 0, file.nbytes)
        and (sizes >= 0).all()
        and _rises(path_ends, 0, len(paths))
        and len(starts) > 0
        and starts[0] == 0
        and starts[-1] == len(offsets)
        and bool((starts[1:] > starts[:-1]).all())
    )
    if not is_right:
        raise wrong_reply(file, "members out of the file")
    return TarIndex(arrays, flaws)


def _rises(numbers: np.ndarray, low: int, high: int) -> bool:
    """Return True if no number is below the one before it, and all are from `low` to `high`."""
    if not len(numbers):
        return True
    return bool(numbers[0] >= low and numbers[-1] <= high and (numbers[1:] >= numbers[:-1]).all())
