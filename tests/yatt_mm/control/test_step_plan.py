"""Tests of the plan of a step, against a plan that was made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.core.refs import Ref
from models.flops import Operations
from yatt_mm.algorithms.token_weights import Weighting
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.training.microbatches import Limits, WorkGroup
from yatt_mm.training.step_plan import (
    Minibatch,
    PlannedGroup,
    PlannedSample,
    StepPlan,
    UpdatePlan,
    _divide,
    plan_step,
    work_of,
)

TOKENS_ALONE = Operations(
    per_token=1, per_token_pair=0, per_scored=0, per_patch=0, per_patch_pair=0, per_window_pair=0, window=0
)
"""Each token is one operation, so that the work of a row is its length."""


def ref(name: str, grid: Sequence[int] | None = None) -> Ref:
    meta = {} if grid is None else {"grid_thw": list(grid)}
    return Ref(name=name, kind="plain", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=None, meta=meta)


def planned_group(position: int, lengths: tuple[int, ...], grids: Sequence[Sequence[int]] = ()) -> PlannedGroup:
    """Return a group with two prompt tokens, and advantages that name the position and the row."""
    group = GroupRef(
        slot=position,
        ref=ref(f"{position}"),
        media=tuple(ref(f"{position}/{k}", grid) for k, grid in enumerate(grids)),
        num_prompt_tokens=2,
        lengths=lengths,
        policy_versions=((0, 0),) * len(lengths),
        finish_reasons=("stop",) * len(lengths),
    )
    advantages = tuple(10.0 * position + row for row in range(len(lengths)))
    return PlannedGroup(position=position, group=group, advantages=advantages)


def plan(groups: list[PlannedGroup], *, num_minibatches: int, replicas: Sequence[int] = (0, 1)) -> StepPlan:
    """Plan a step on two replicas, whose microbatches hold eight tokens."""
    return plan_step(
        groups,
        operations=TOKENS_ALONE,
        num_replicas=2,
        num_minibatches=num_minibatches,
        limits=Limits(max_tokens=8),
        replicas=replicas,
    )


def sample(group: int, row: int, advantage: float, num_tokens: int) -> PlannedSample:
    """`num_tokens`: of the whole update."""
    return PlannedSample(group=group, row=row, advantage=advantage, token_weight=1 / num_tokens)


def test_a_step_is_planned_as_by_hand() -> None:
    three, five, seven, ten = (
        planned_group(position, lengths) for position, lengths in ((3, (4,)), (5, (2,)), (7, (3, 3)), (10, (6,)))
    )
    found = plan([ten, five, three, seven], num_minibatches=2)
    # The first update is prompts 3 and 5, with 6 and 4 tokens. The second is prompts 7 and 10: two rows of 5 tokens,
    # which do not fit a microbatch together, and one of 8. The second replica has an empty microbatch then.
    first = UpdatePlan(
        groups=(three.group, seven.group),
        minibatches=(
            Minibatch(microbatches=((sample(0, 0, 30.0, 6),),), total_weight=1.0),
            Minibatch(microbatches=((sample(1, 0, 70.0, 12),), (sample(1, 1, 71.0, 12),)), total_weight=1.0),
        ),
    )
    second = UpdatePlan(
        groups=(five.group, ten.group),
        minibatches=(
            Minibatch(microbatches=((sample(0, 0, 50.0, 6),),), total_weight=1.0),
            Minibatch(microbatches=((sample(1, 0, 100.0, 12),), ()), total_weight=1.0),
        ),
    )
    # 6 over a mean of 5 is more uneven than 10 over a mean of 9
    assert found == StepPlan(replicas=(first, second), imbalance=6 / 5, num_microbatches=1 + 2)


def test_replicas_are_planned_in_the_order_of_the_request() -> None:
    groups = [planned_group(3, (4,)), planned_group(5, (2,))]
    both = plan(groups, num_minibatches=1)
    assert both.replicas[0] != both.replicas[1]
    assert plan(groups, num_minibatches=1, replicas=(1, 0)).replicas == both.replicas[::-1]
    assert plan(groups, num_minibatches=1, replicas=(1,)).replicas == both.replicas[1:]


def test_a_step_without_samples_is_one_empty_microbatch_and_even() -> None:
    empty = UpdatePlan(groups=(), minibatches=(Minibatch(microbatches=((),), total_weight=0.0),))
    assert plan([], num_minibatches=1) == StepPlan(replicas=(empty, empty), imbalance=1.0, num_microbatches=1)


def test_the_weight_of_a_single_sampled_token_is_one_and_work_that_is_even_has_imbalance_one() -> None:
    found = plan([planned_group(0, (1,))], num_minibatches=1)
    assert found.replicas[0].minibatches[0].microbatches == ((sample(0, 0, 0.0, 1),),)
    assert plan([planned_group(0, (1,)), planned_group(1, (1,))], num_minibatches=1).imbalance == 1.0


def test_the_work_of_a_group_counts_prompts_in_each_row_and_images_once() -> None:
    operations = Operations(
        per_token=100, per_token_pair=1, per_scored=1000, per_patch=10, per_patch_pair=0, per_window_pair=0, window=0
    )
    planned = planned_group(4, (3, 5), grids=((1, 4, 6), (2, 4, 2)))
    assert work_of(planned, operations) == WorkGroup(
        position=4,
        num_tokens=(5, 7),
        num_patches=24 + 16,
        row_costs=(500 + 25 + 3000, 700 + 49 + 5000),
        shared_cost=240 + 160,
    )


def test_updates_take_whole_prompts_in_order_and_differ_by_at_most_one() -> None:
    groups = [planned_group(position, (1,)) for position in range(7)]
    assert [[g.position for g in part] for part in _divide(groups, 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [[g.position for g in part] for part in _divide(groups[:2], 3)] == [[], [0], [1]]
    assert [[g.position for g in part] for part in _divide(groups[:4], 1)] == [[0, 1, 2, 3]]


def test_weights_are_those_of_all_replicas_and_of_one_update() -> None:
    groups = [planned_group(3, (4, 2)), planned_group(5, (1,)), planned_group(7, (3,))]
    found = plan_step(
        groups,
        operations=TOKENS_ALONE,
        num_replicas=2,
        num_minibatches=2,
        limits=Limits(max_tokens=8),
        replicas=(0, 1),
        weighting=Weighting(kind="constant", max_tokens=4),
    )
    # the first update has a group of two responses, and the second two groups of one
    weights = [
        {(replica.groups[s.group].slot, s.row): s.token_weight for micro in m.microbatches for s in micro}
        for replica in found.replicas
        for m in replica.minibatches
    ]
    assert weights[0] | weights[2] == {(3, 0): 1 / 8, (3, 1): 1 / 8}
    assert weights[1] | weights[3] == {(5, 0): 1 / 8, (7, 0): 1 / 8}
    assert [m.total_weight for m in found.replicas[0].minibatches] == [6 / 8, 4 / 8]
