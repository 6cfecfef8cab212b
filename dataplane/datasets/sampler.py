"""The sampler decides which samples come next: shuffled by epoch, mixed by weight, divided among controllers. It
resumes from a few numbers.

It is pure Python and keeps nothing per sample. The caller decides what to do with samples that turn out to be bad.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from dataplane.core.errors import BadRequestError
from dataplane.core.refs import Sample
from dataplane.datasets.mixing import next_source, whole_weights
from dataplane.datasets.permutation import permuted

Tail = Literal["wrap", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A dataset to draw from."""

    dataset: str
    num_samples: int
    """The number of samples of the dataset, as `Client.ingest` returns it."""
    weight: float = 1.0
    """The share of all samples that this source gives, in proportion to the weights of the other sources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One drawn sample: its place in the run and in its dataset."""

    position: int
    """The number of samples that all controllers drew before this one. It identifies the sample within the run."""
    dataset: str
    epoch: int
    """The number of times that the dataset was used up before."""
    index: int
    """The number of the sample within the dataset, for `Client.samples`."""


class LoadsSamples(Protocol):
    """The method of `Client` that `load` needs."""

    def samples(self, dataset: str, indices: Sequence[int]) -> list[Sample]:
        """Return the samples at these places of a dataset."""


class Sampler:
    """Deals out global batches in an order that depends on the seed alone. Not thread-safe.

    Every controller has its own sampler with the same arguments and takes its share of each batch: position p of a
    batch belongs to rank p % world_size. So the samples of all controllers together do not depend on the number of
    controllers. `tail` says what happens at the end of an epoch that fills no batch: `wrap` completes the batch from
    the next epoch, `drop` leaves it out (for one source only, because several sources have separate epochs).
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int,
        batch_size: int,
        shuffle: bool = True,
        tail: Tail = "wrap",
    ) -> None:
        _check(sources, batch_size, tail)
        self.sources = tuple(sources)
        """The datasets to draw from."""
        self._seed = seed
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._tail: Tail = tail
        self._weights = whole_weights([source.weight for source in sources])
        self._counts = [0] * len(sources)
        self._num_unused = [0] * len(sources)

    @property
    def num_drawn(self) -> int:
        """The number of samples that were drawn so far, from all sources and by all controllers."""
        return sum(self._counts)

    def next_batch(self, rank: int = 0, world_size: int = 1) -> list[Draw]:
        """Return this rank's share of the next global batch, and move on by the whole batch."""
        if not 0 <= rank < world_size:
            raise BadRequestError(f"rank is {rank} of world_size {world_size}; wanted 0 to world_size - 1")
        draws = []
        for at in range(self._batch_size):
            used = [count - unused for count, unused in zip(self._counts, self._num_unused, strict=True)]
            source = next_source(used, self._weights)
            if at % world_size == rank:
                draws.append(self._draw(source))
            self._counts[source] += 1
        return draws

    def leave_out(self, dataset: str) -> None:
        """Note that one drawn sample of a data set is not used, so that the set gives another one in its place: shares
        are those of the samples that are used. Every controller must note the same."""
        self._num_unused[[source.dataset for source in self.sources].index(dataset)] += 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as JSON-safe values: a few numbers per source."""
        return {
            "seed": self._seed,
            "batch_size": self._batch_size,
            "shuffle": self._shuffle,
            "tail": self._tail,
            "sources": [
                {
                    "dataset": source.dataset,
                    "num_samples": source.num_samples,
                    "weight": source.weight,
                    "epoch": count // self._epoch_size(source),
                    "cursor": count % self._epoch_size(source),
                    "num_unused": unused,
                }
                for source, count, unused in zip(self.sources, self._counts, self._num_unused, strict=True)
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], sources: Sequence[Source] | None = None) -> "Sampler":
        """Return a sampler that continues exactly where `state` was taken. Raises BadRequestError if the present
        `sources` differ."""
        try:
            entries = state["sources"]
            then = [
                Source(dataset=entry["dataset"], num_samples=entry["num_samples"], weight=entry["weight"])
                for entry in entries
            ]
            sampler = cls(
                then,
                seed=state["seed"],
                batch_size=state["batch_size"],
                shuffle=state["shuffle"],
                tail=state["tail"],
            )
            for at, entry in enumerate(entries):
                sampler._counts[at] = entry["epoch"] * sampler._epoch_size(then[at]) + entry["cursor"]
                sampler._num_unused[at] = entry.get("num_unused", 0)
        except (KeyError, TypeError) as error:
            raise BadRequestError(f"that is no state of a sampler: {error!r}") from error
        if sources is not None and list(sources) != then:
            raise BadRequestError(
                f"the state was taken with {_describe(then)}, now there is {_describe(sources)}; the order would not "
                "go on: use the same data and weights, or start afresh"
            )
        return sampler

    def _epoch_size(self, source: Source) -> int:
        dropped = source.num_samples % self._batch_size if self._tail == "drop" else 0
        return source.num_samples - dropped

    def _draw(self, at: int) -> Draw:
        source, count = self.sources[at], self._counts[at]
        epoch, place = divmod(count, self._epoch_size(source))
        index = place
        if self._shuffle:  # each source has its own key, otherwise sets of the same size would have the same order
            index = permuted(place, source.num_samples, self._seed, epoch, source.dataset)
        return Draw(position=self.num_drawn, dataset=source.dataset, epoch=epoch, index=index)


def load(client: LoadsSamples, draws: Sequence[Draw]) -> list[Sample]:
    """Return the samples of some draws, in their order, with one call per dataset."""
    by_dataset: dict[str, list[int]] = defaultdict(list)
    for draw in draws:
        by_dataset[draw.dataset].append(draw.index)
    loaded = {name: iter(client.samples(name, indices)) for name, indices in by_dataset.items()}
    return [next(loaded[draw.dataset]) for draw in draws]


def _check(sources: Sequence[Source], batch_size: int, tail: str) -> None:
    if not sources:
        raise BadRequestError("a sampler without sources; wanted at least one dataset")
    if batch_size < 1:
        raise BadRequestError(f"batch_size is {batch_size}; wanted at least 1")
    if tail not in ("wrap", "drop"):
        raise BadRequestError(f"tail is {tail!r}; wanted 'wrap' or 'drop'")
    names = [source.dataset for source in sources]
    if len(set(names)) != len(names):
        raise BadRequestError(
            f"sources name a dataset twice: {', '.join(names)}; give it once with the sum of its weights"
        )
    for source in sources:
        if source.num_samples < 1:
            raise BadRequestError(f"{source.dataset} has {source.num_samples} samples; wanted at least 1")
        if not 0 < source.weight < float("inf"):
            raise BadRequestError(f"the weight of {source.dataset} is {source.weight}; wanted more than 0")
    if tail == "drop" and len(sources) > 1:
        raise BadRequestError("tail is 'drop' with several sources, whose epochs end at different times; use 'wrap'")
    if tail == "drop" and sources[0].num_samples < batch_size:
        raise BadRequestError(
            f"tail is 'drop', but {sources[0].dataset} has {sources[0].num_samples} samples, less than one batch of "
            f"{batch_size}; use 'wrap' or a smaller batch_size"
        )


def _describe(sources: Sequence[Source]) -> str:
    return ", ".join(f"{source.dataset} ({source.num_samples} samples, weight {source.weight})" for source in sources)
