"""Tests of a step's plan: nothing lost, caps kept, the same from every controller, and work divided evenly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.core.refs import Ref
from models.flops import count_operations
from tests.yatt_mm.control.pieces import work_group
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.training.balance import max_over_mean, spread
from yatt_mm.training.largest_differencing import largest_differencing
from yatt_mm.training.microbatches import Limits, Piece, WorkGroup, lay_out, num_microbatches
from yatt_mm.training.step_plan import PlannedGroup, StepPlan, plan_step

work_groups = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 50), st.integers(1, 10**9)), min_size=1, max_size=9),
        st.tuples(st.integers(0, 60), st.integers(0, 3 * 10**9)),
    ),
    min_size=1,
    max_size=12,
).map(lambda drawn: [work_group(position, rows, image) for position, (rows, image) in enumerate(drawn)])
limits = st.builds(
    Limits,
    max_tokens=st.integers(50, 150),
    max_patches=st.none() | st.integers(60, 100),
    multiple_of=st.integers(1, 3),
)


def rows_of(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(piece.group.position, row) for piece in pieces for row in piece.rows]


@given(groups=work_groups, num_replicas=st.integers(1, 5), limits=limits)
def test_every_row_is_trained_once_under_both_caps_in_as_many_microbatches_everywhere(
    groups: list[WorkGroup], num_replicas: int, limits: Limits
) -> None:
    replicas = spread(groups, num_replicas, limits)
    num = num_microbatches(replicas, limits)
    laid_out = [lay_out(pieces, num, limits) for pieces in replicas]
    trained = [row for replica in laid_out for micro in replica for row in rows_of(micro)]
    assert sorted(trained) == sorted((g.position, row) for g in groups for row in range(len(g.num_tokens)))
    assert num % limits.multiple_of == 0
    for replica in laid_out:
        assert len(replica) == num
        for micro in replica:
            assert sum(piece.num_tokens for piece in micro) <= limits.max_tokens
            if limits.max_patches is not None:
                assert sum(piece.group.num_patches for piece in micro) <= limits.max_patches


@given(groups=work_groups, num_replicas=st.integers(1, 5), limits=limits, seed=st.randoms())
def test_a_plan_does_not_depend_on_the_order_of_the_reports(
    groups: list[WorkGroup], num_replicas: int, limits: Limits, seed: object
) -> None:
    shuffled = groups.copy()
    seed.shuffle(shuffled)  # type: ignore[attr-defined]

    def named(order: list[WorkGroup]) -> list[list[list[tuple[int, int]]]]:
        replicas = spread(order, num_replicas, limits)
        num = num_microbatches(replicas, limits)
        return [[rows_of(micro) for micro in lay_out(pieces, num, limits)] for pieces in replicas]

    assert named(groups) == named(shuffled)


@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=8), num_parts=st.integers(2, 3))
def test_differencing_is_within_four_thirds_of_the_best_partition(costs: list[int], num_parts: int) -> None:
    # Michiels, Korst, Aarts and van Leeuwen (2003): at most 4/3 - 1/(3 m) for m parts
    parts = largest_differencing(costs, num_parts)
    assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
    found = max(sum(costs[i] for i in part) for part in parts)
    best = min(
        max(sum(cost for cost, part in zip(costs, choice) if part == k) for k in range(num_parts))
        for choice in itertools.product(range(num_parts), repeat=len(costs))
    )
    assert found <= best * 4 / 3


def test_differencing_does_the_worked_example() -> None:
    # 8 7 6 5 4 -> differences 8-7=1, 6-5=1, 4-1=3, 3-1=2: the parts' sums are 16 and 14
    parts = largest_differencing([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_very_many_numbers_are_evened_out_and_a_giant_gets_a_part_of_its_own() -> None:
    costs = [10_000, *range(1, 200)]
    parts = largest_differencing(costs, 3)
    assert sorted(itertools.chain(*parts)) == list(range(200))
    assert [0] in parts
    assert sorted(sum(costs[i] for i in part) for part in parts) == [9950, 9950, 10_000]


def test_sums_beyond_63_bits_are_balanced_as_well() -> None:
    costs = [2**62 + i for i in range(8)]
    assert [len(part) for part in largest_differencing(costs, 4)] == [2, 2, 2, 2]


def test_rows_of_a_group_stay_together_where_that_costs_nothing() -> None:
    groups = [work_group(p, [(10, 100)] * 4, (16, 400)) for p in range(8)]
    replicas = spread(groups, 4, Limits(max_tokens=100))
    assert [len(pieces) for pieces in replicas] == [2, 2, 2, 2]
    assert all(piece.rows == (0, 1, 2, 3) for pieces in replicas for piece in pieces)


def test_a_group_is_split_where_encoding_twice_is_cheaper_than_waiting() -> None:
    group = [work_group(0, [(10, 100)] * 8, (16, 50))]
    loads = [sum(piece.cost for piece in pieces) for pieces in spread(group, 4, Limits(max_tokens=100))]
    assert loads == [250, 250, 250, 250]
    expensive = [work_group(0, [(10, 100)] * 2, (16, 10**6))]
    assert sorted(len(pieces) for pieces in spread(expensive, 2, Limits(max_tokens=100))) == [0, 1]


def test_light_microbatches_stand_at_both_ends() -> None:
    pieces = [Piece(group=work_group(p, [(10, cost)], (0, 0)), rows=(0,)) for p, cost in enumerate([5, 3, 1, 4, 2])]
    found = lay_out(pieces, 5, Limits(max_tokens=10))
    assert [sum(piece.cost for piece in micro) for micro in found] == [1, 3, 5, 4, 2]


def test_what_does_not_fit_a_microbatch_is_named() -> None:
    with pytest.raises(ValueError, match=r"prompt 3 has 11 tokens; train\.max_tokens_per_microbatch is 10"):
        spread([work_group(3, [(11, 1)], (0, 0))], 1, Limits(max_tokens=10))
    with pytest.raises(ValueError, match=r"prompt 3 have 70 patches; train\.max_patches_per_microbatch is 64"):
        spread([work_group(3, [(5, 1)], (70, 1))], 1, Limits(max_tokens=10, max_patches=64))


def planned_group(position: int, lengths: tuple[int, ...]) -> PlannedGroup:
    ref = Ref(name=f"{position}", kind="plain", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=None)
    group = GroupRef(
        slot=position,
        ref=ref,
        media=(),
        num_prompt_tokens=5,
        lengths=lengths,
        policy_versions=((0, 0),) * len(lengths),
        finish_reasons=("stop",) * len(lengths),
    )
    return PlannedGroup(
        position=position, group=group, advantages=tuple(10.0 * position + row for row in range(len(lengths)))
    )


def step_plan(groups: list[PlannedGroup], num_replicas: int, replicas: list[int]) -> StepPlan:
    return plan_step(
        groups,
        operations=count_operations(CONFIG),
        num_replicas=num_replicas,
        num_minibatches=2,
        limits=Limits(max_tokens=30),
        replicas=replicas,
    )


CONFIG = {
    "model_type": "qwen2_5_vl",
    "text_config": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 200,
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 64,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    },
}


def test_a_controller_that_plans_its_own_replicas_gets_what_all_would_get_and_weights_are_global() -> None:
    groups = [planned_group(position, (1 + position, 3, 7)) for position in range(6)]
    whole = step_plan(groups, 3, [0, 1, 2])
    alone = step_plan(groups[::-1], 3, [2])
    assert alone.replicas == (whole.replicas[2],)
    assert (alone.imbalance, alone.num_microbatches) == (whole.imbalance, whole.num_microbatches)
    weights = [{s.token_weight for micro in m.microbatches for s in micro} for m in whole.replicas[0].minibatches]
    assert weights == [{1 / 36}, {1 / 45}]
    advantages = [
        ((plan.groups[sample.group].slot, sample.row), sample.advantage)
        for plan in whole.replicas
        for minibatch in plan.minibatches
        for micro in minibatch.microbatches
        for sample in micro
    ]
    rows = [(position, row) for position in range(6) for row in range(3)]
    assert sorted(advantages) == [((position, row), 10.0 * position + row) for position, row in rows]


def test_max_over_mean_of_no_work_at_all_is_one() -> None:
    assert max_over_mean([0, 0]) == 1.0
    assert max_over_mean([3, 1]) == 1.5
