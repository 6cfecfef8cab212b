"""The plan of one training step: which rank trains which sample, in which microbatch. Pure data and arithmetic.

Every controller computes the same plan from the same few numbers per sample; the ranks resolve what they need. Imported
in controllers: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from models.flops import Operations
from yatt_mm.algorithms.token_weights import UpdateWeights, Weighting
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.training.balance import max_over_mean, spread
from yatt_mm.training.microbatches import Limits, Piece, WorkGroup, lay_out, num_microbatches

EVERY_TOKEN = Weighting()
"""All tokens of an update have the same weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGroup:
    """A group to train on, in the form in which every controller describes it to the others."""

    position: int
    """The prompt's position in the run's order."""
    group: GroupRef
    advantages: tuple[float, ...]
    """[G] the advantages of its rows; with a critic, their scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSample:
    """One row of a group, with the values that the loss needs."""

    group: int
    """The index into the plan's groups."""
    row: int
    advantage: float
    """The advantage of its tokens; with a critic, its score, of which the ranks make them."""
    token_weight: float
    """The weight of each of its sampled tokens in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """One optimizer update on one data-parallel replica."""

    microbatches: tuple[tuple[PlannedSample, ...], ...]
    """The microbatches; the same number on every replica, and some may be empty."""
    total_weight: float
    """The sum of the weights of all sampled tokens of this update, over all replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What one data-parallel replica trains in one step."""

    groups: tuple[GroupRef, ...]
    minibatches: tuple[Minibatch, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The plans of the requested replicas, and how even the work of all replicas is."""

    replicas: tuple[UpdatePlan, ...]
    """The plans, in the order of the request."""
    imbalance: float
    """The largest planned work of a replica over the mean, in the step's most uneven update."""
    num_microbatches: int
    """The microbatches of one replica, over all updates of the step."""


def plan_step(
    groups: Sequence[PlannedGroup],
    *,
    operations: Operations,
    num_replicas: int,
    num_minibatches: int,
    limits: Limits,
    replicas: Sequence[int],
    weighting: Weighting = EVERY_TOKEN,
) -> StepPlan:
    """Return the plan of what `replicas` train in a step: the samples of all controllers, spread over all replicas.

    Minibatches take whole prompts in the run's order. The plan depends on the groups alone, not on the order in which
    controllers reported them.

    Raises:
        ValueError: a sample, or the images of a prompt, are larger than a microbatch may be.
    """
    by_position = {group.position: group for group in sorted(groups, key=lambda group: group.position)}
    parts = _divide(list(by_position.values()), num_minibatches)
    imbalance, num_micro = 1.0, 0
    shares: list[list[list[list[Piece]]]] = []
    for part in parts:
        work = spread([work_of(group, operations) for group in part], num_replicas, limits)
        imbalance = max(imbalance, max_over_mean([sum(piece.cost for piece in pieces) for pieces in work]))
        num = num_microbatches(work, limits)
        num_micro += num
        shares.append([lay_out(work[replica], num, limits) for replica in replicas])
    weights = [_weights(part, weighting) for part in parts]
    plans = [_update_plan([share[k] for share in shares], weights, by_position) for k in range(len(replicas))]
    return StepPlan(replicas=tuple(plans), imbalance=imbalance, num_microbatches=num_micro)


def work_of(planned: PlannedGroup, operations: Operations) -> WorkGroup:
    """Return a group in the form that balancing uses."""
    group = planned.group
    num_tokens = tuple(group.num_prompt_tokens + length for length in group.lengths)
    grids = [(int(t), int(h), int(w)) for t, h, w in (ref.meta["grid_thw"] for ref in group.media)]
    return WorkGroup(
        position=planned.position,
        num_tokens=num_tokens,
        num_patches=sum(t * h * w for t, h, w in grids),
        row_costs=tuple(operations.decoder(num, scored) for num, scored in zip(num_tokens, group.lengths)),
        shared_cost=operations.tower(grids),
    )


def _divide(groups: Sequence[PlannedGroup], num_parts: int) -> list[list[PlannedGroup]]:
    """Return equal parts, in order."""
    bounds = [len(groups) * k // num_parts for k in range(num_parts + 1)]
    return [list(groups[begin:end]) for begin, end in pairwise(bounds)]


def _weights(groups: Sequence[PlannedGroup], weighting: Weighting) -> UpdateWeights:
    """Return the weights of the tokens of an update on these groups."""
    return UpdateWeights.of(
        weighting,
        (response for one in groups for response in zip(one.group.lengths, one.group.finish_reasons, strict=True)),
    )


def _update_plan(
    share: Sequence[Sequence[Sequence[Piece]]], weights: Sequence[UpdateWeights], groups: Mapping[int, PlannedGroup]
) -> UpdatePlan:
    """Return one replica's plan from its [minibatch][microbatch] pieces."""
    used = sorted({piece.group.position for minibatch in share for micro in minibatch for piece in micro})
    place = {position: k for k, position in enumerate(used)}

    def planned(pieces: Sequence[Piece], weights: UpdateWeights) -> tuple[PlannedSample, ...]:
        rows = [(groups[piece.group.position], row) for piece in pieces for row in piece.rows]
        return tuple(
            PlannedSample(
                group=place[one.position],
                row=row,
                advantage=one.advantages[row],
                token_weight=weights.of_response(one.group.lengths[row], one.group.finish_reasons[row]),
            )
            for one, row in rows
        )

    return UpdatePlan(
        groups=tuple(groups[position].group for position in used),
        minibatches=tuple(
            Minibatch(microbatches=tuple(planned(micro, its) for micro in minibatch), total_weight=its.total)
            for minibatch, its in zip(share, weights, strict=True)
        ),
    )
