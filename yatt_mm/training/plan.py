"""The plan of one training step: which rank trains which sample, in which microbatch. Pure data and arithmetic.

Every controller computes the same plan from the same few numbers per sample; the ranks resolve what they own.
Imported in controllers: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yatt_mm.rollout.messages import GroupRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group to train on, as every controller tells all others of it."""

    position: int
    """The prompt's position in the run's order."""
    group: GroupRef
    advantages: tuple[float, ...]
    """[G]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """What balancing needs to know of a sample."""

    position: int
    """The prompt's position in the run's order."""
    row: int
    """The sample's place in its group."""
    num_tokens: int
    """Prompt and response, image placeholders expanded."""
    num_sampled: int
    """Response tokens."""
    num_patches: int
    """Rows that the vision tower reads for this sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """One row of a group, with what the loss wants to know."""

    group: int
    """Index into the plan's groups."""
    row: int
    advantage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer update on one data-parallel replica."""

    microbatches: tuple[tuple[PlannedSample, ...], ...]
    """The same number on every replica; some may be empty."""
    token_weight: float
    """1 / sampled tokens of this update over all replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What one data-parallel replica trains in one step."""

    groups: tuple[GroupRef, ...]
    minibatches: tuple[Minibatch, ...]


def plan_step(
    groups: Sequence[PlannedGroup], *, num_replicas: int, num_minibatches: int, max_tokens: int
) -> list[UpdatePlan]:
    """[replica] what it trains in a step: the samples of all controllers, balanced.

    Raises:
        ValueError: a sample is longer than a microbatch may be.
    """
    sizes = [
        SampleSize(
            position=group.position,
            row=row,
            num_tokens=group.group.num_prompt_tokens + length,
            num_sampled=length,
            num_patches=sum(ref.shape[0] for ref in group.group.media),
        )
        for group in sorted(groups, key=lambda group: group.position)
        for row, length in enumerate(group.group.lengths)
    ]
    shares = balance(sizes, num_replicas=num_replicas, num_minibatches=num_minibatches, max_tokens=max_tokens)
    by_position = {group.position: group for group in groups}
    return [_replica_plan(replica, shares, sizes, by_position) for replica in range(num_replicas)]


def balance(
    samples: Sequence[SampleSize], *, num_replicas: int, num_minibatches: int, max_tokens: int
) -> list[list[list[list[int]]]]:
    """[minibatch][replica][microbatch] lists of indices into `samples`.

    Minibatches take whole prompts in the run's order. The samples of a group stay together as far as a microbatch
    holds them, so that their image is encoded once for all of them. Inside a minibatch the dearest of these units
    goes to the replica with the least work so far (longest processing time first), then into the first microbatch
    with room. The result depends on the samples alone, not on the order in which controllers reported them.

    Raises:
        ValueError: a sample is longer than a microbatch may be.
    """
    order = sorted(range(len(samples)), key=lambda i: (samples[i].position, samples[i].row))
    for i in order:
        if samples[i].num_tokens > max_tokens:
            raise ValueError(
                f"a sample has {samples[i].num_tokens} tokens; train.max_tokens_per_microbatch is {max_tokens}: "
                "raise it, or lower rollout.max_tokens or the image size"
            )
    positions = sorted({samples[i].position for i in order})
    minibatch_of = {p: k * num_minibatches // len(positions) for k, p in enumerate(positions)}
    plan = []
    for minibatch in range(num_minibatches):
        members = [i for i in order if minibatch_of[samples[i].position] == minibatch]
        units = _units(samples, members, max_tokens)
        replicas = [_pack(samples, part, max_tokens) for part in _spread(samples, units, num_replicas)]
        most = max(len(microbatches) for microbatches in replicas)
        plan.append([microbatches + [[] for _ in range(most - len(microbatches))] for microbatches in replicas])
    return plan


def cost(unit: Sequence[SampleSize]) -> int:
    """Work of samples that share their image, in arbitrary units; a patch is a quarter of a (merged) token."""
    return 4 * sum(sample.num_tokens for sample in unit) + max(sample.num_patches for sample in unit)


def _units(samples: Sequence[SampleSize], members: list[int], max_tokens: int) -> list[list[int]]:
    """Rows of the same group, as many together as a microbatch holds."""
    units: list[list[int]] = []
    room = 0
    for i in members:
        is_same_group = bool(units) and samples[units[-1][-1]].position == samples[i].position
        if not is_same_group or samples[i].num_tokens > room:
            units.append([])
            room = max_tokens
        units[-1].append(i)
        room -= samples[i].num_tokens
    return units


def _spread(samples: Sequence[SampleSize], units: list[list[int]], num_replicas: int) -> list[list[list[int]]]:
    costs = [cost([samples[i] for i in unit]) for unit in units]
    parts: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    load = [0] * num_replicas
    for k in sorted(range(len(units)), key=lambda k: -costs[k]):
        replica = load.index(min(load))
        parts[replica].append(units[k])
        load[replica] += costs[k]
    return parts


def _pack(samples: Sequence[SampleSize], units: list[list[int]], max_tokens: int) -> list[list[int]]:
    microbatches: list[list[int]] = [[]]
    room = [max_tokens]
    for unit in units:
        num_tokens = sum(samples[i].num_tokens for i in unit)
        fitting = (k for k, free in enumerate(room) if free >= num_tokens)
        k = next(fitting, len(room))
        if k == len(room):
            microbatches.append([])
            room.append(max_tokens)
        microbatches[k] += unit
        room[k] -= num_tokens
    return microbatches


def _replica_plan(
    replica: int,
    shares: list[list[list[list[int]]]],
    sizes: Sequence[SampleSize],
    groups: Mapping[int, PlannedGroup],
) -> UpdatePlan:
    used = sorted({sizes[i].position for minibatch in shares for micro in minibatch[replica] for i in micro})
    place = {position: k for k, position in enumerate(used)}

    def planned(size: SampleSize) -> PlannedSample:
        advantage = groups[size.position].advantages[size.row]
        return PlannedSample(group=place[size.position], row=size.row, advantage=advantage)

    minibatches = []
    for minibatch in shares:
        num_tokens = sum(sizes[i].num_sampled for part in minibatch for micro in part for i in micro)
        microbatches = tuple(tuple(planned(sizes[i]) for i in micro) for micro in minibatch[replica])
        minibatches.append(Minibatch(microbatches=microbatches, token_weight=1 / max(1, num_tokens)))
    return UpdatePlan(groups=tuple(groups[position].group for position in used), minibatches=tuple(minibatches))
