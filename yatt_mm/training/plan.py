"""The plan of one training step: which rank trains which sample, in which microbatch. Pure data and arithmetic.

Every controller computes the same plan from the same few numbers per sample; the ranks resolve what they own.
Imported in controllers: no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from yatt_mm.rollout.messages import GroupRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """What balancing needs to know of a sample; every controller sends these to all others."""

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
