"""Tests of which rollouts a controller keeps, and when it releases their records. The keeper here only notes its calls;
the real one is in tests/yatt_mm/keeper and in the whole runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.yatt_mm.generation.fakes import Records, config_of, group, prompt
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.common.conversation import ask
from yatt_mm.control import kept_rollouts
from yatt_mm.control.kept_rollouts import KeptRollouts
from yatt_mm.generation.batch_filler import FilledBatch
from yatt_mm.protocol.control import ScoredGroup, Slot
from yatt_mm.protocol.kept import KeptGroup
from yatt_mm.protocol.rollout import PromptTask


class Keeper:
    """A keeper that notes what it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, list[KeptGroup]]] = []
        self.last: list[bool] = []
        self.restart_counts: list[int] = []
        self.keep = self

    def remote(self, step: int, split: str, groups: list[KeptGroup], *, is_last: bool, restart_count: int) -> str:
        self.calls.append((step, split, groups))
        self.last.append(is_last)
        self.restart_counts.append(restart_count)
        return f"call {len(self.calls)}"


def scored(position: int) -> ScoredGroup:
    task = PromptTask(slot=position, conversation=ask("?"), media=(), num_samples=2, seed=0, name=f"group/{position}")
    slot = Slot(position=position, epoch=0, index=position)
    return ScoredGroup(prompt=prompt(slot), group=group(task, "stop"), rewards=(0.0, 1.0))


def filled(*, kept: range, dropped: range, carried: range) -> FilledBatch:
    judged = [scored(position) for position in (*kept, *dropped, *carried)]
    return FilledBatch(
        kept=[replace(group, advantages=(-1.0, 1.0)) for group in judged[: len(kept)]],
        judged=judged,
        outcome=RoundOutcome(is_full=True, kept=tuple(kept), carried=tuple(carried)),
        num_rounds=1,
        dropped=[scored(position).group.ref for position in dropped],
    )


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(kept_rollouts, "wait_all", lambda these, **_: calls.extend(call for _, call in these))
    return calls


def rollouts(keeper: Keeper | None, *overrides: str) -> tuple[KeptRollouts, Records]:
    records: Any = Records()
    config = config_of("train.prompts_per_step=8", *overrides)
    return KeptRollouts(keeper, records, config, restart_count=2), records


def positions(call: tuple[int, str, list[KeptGroup]]) -> dict[int, tuple[float, ...] | None]:
    return {kept.scored.prompt.slot.position: kept.advantages for kept in call[2]}


def test_a_few_prompts_of_a_step_are_kept_with_the_advantages_of_those_it_trains_on() -> None:
    keeper = Keeper()
    kept, _ = rollouts(keeper)
    kept.keep_batch(filled(kept=range(8), dropped=range(8, 12), carried=range(12, 16)), step=3)
    (call,) = keeper.calls
    assert call[:2] == (3, "train")
    found = positions(call)
    assert list(found) == [0, 2, 4, 6, 8, 10], "every second prompt, but none that goes on in the next step"
    assert found[8] is found[10] is None
    assert found[0] == (-1.0, 1.0)


def test_all_are_kept_where_all_are_wanted_and_none_without_a_keeper() -> None:
    keeper = Keeper()
    kept, _ = rollouts(keeper, "rollouts.keep=all")
    kept.keep_evaluation([([scored(position) for position in range(5)], 5)], step=0)
    assert list(positions(keeper.calls[0])) == [0, 1, 2, 3, 4]
    nothing, records = rollouts(None, "rollouts.keep=none")
    nothing.keep_evaluation([([scored(0)], 5)], step=0)
    assert records.released == ["group/0"]


def test_a_record_that_the_keeper_may_still_read_is_released_after_it_has_and_others_at_once(waited: list[Any]) -> None:
    keeper = Keeper()
    kept, records = rollouts(keeper)
    kept.keep_batch(filled(kept=range(4), dropped=range(4, 6), carried=range(0)), step=1)
    assert records.released == ["group/5"]
    kept.release([scored(position).group.ref for position in range(4)])
    assert records.released == ["group/5", "group/1", "group/3"]
    kept.finish()
    assert waited == ["call 1"]
    assert records.released[3:] == ["group/4", "group/0", "group/2"]
    kept.finish()
    assert len(records.released) == 6 and waited == ["call 1"]


def test_many_groups_go_in_portions_without_the_other_fields_of_their_samples(waited: list[Any]) -> None:
    keeper = Keeper()
    kept, _ = rollouts(keeper, "rollouts.keep=all")
    large = [replace(group, prompt=replace(group.prompt, fields={"x": 1})) for group in map(scored, range(70))]
    kept.keep_evaluation([(large, 70)], step=0)
    kept.keep_evaluation([([], 70)], step=1)
    assert [len(groups) for _, _, groups in keeper.calls] == [32, 32, 6, 0]
    assert keeper.last == [False, False, True, True], "a controller without groups says so"
    assert all(group.scored.prompt.fields == {} for _, _, groups in keeper.calls for group in groups)
    kept.finish()
    assert len(waited) == 4


def test_every_evaluation_keeps_the_same_few_samples_and_small_ones_are_kept_whole() -> None:
    config = config_of()
    assert [at for at in range(64) if config.rollouts.keeps(at, 64)] == [0, 16, 32, 48]
    assert [at for at in range(6) if config.rollouts.keeps(at, 6)] == [0, 2, 4]
    assert [at for at in range(3) if config.rollouts.keeps(at, 3)] == [0, 1, 2]


def test_a_step_that_goes_on_after_a_fault_is_sent_again_with_the_number_of_the_restart() -> None:
    keeper = Keeper()
    kept, _ = rollouts(keeper)
    again = [replace(scored(position), advantages=(float(position), 0.0)) for position in range(8)]
    kept.keep_again(again, step=3, all_groups=False)
    (call,) = keeper.calls
    assert call[:2] == (3, "train") and keeper.restart_counts == [2]
    found = positions(call)
    assert found == {position: (float(position), 0.0) for position in (0, 2, 4, 6)}
    kept.keep_again([scored(position) for position in range(8)], step=4, all_groups=True)
    assert list(positions(keeper.calls[-1])) == list(range(8))
