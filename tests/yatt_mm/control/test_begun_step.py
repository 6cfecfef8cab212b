"""Tests of a controller's part in saving begun steps. The keeper and the rendezvous here are stand-ins; the real ones
are in tests/yatt_mm/keeper, tests/yatt_mm/batching and the whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.yatt_mm.control.test_kept_rollouts import scored
from tests.yatt_mm.generation.fakes import config_of, prompt
from yatt_mm.batching.journal import StepShare
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import DataError
from yatt_mm.control import begun_step
from yatt_mm.control.begun_step import BegunStepSaver
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.protocol.control import Slot
from yatt_mm.protocol.saved_groups import SavedGroup, SavedShare
from yatt_mm.protocol.step_meter import StepMeter


class Keeper:
    """A keeper that remembers what it was given, and notes under which names it puts records back."""

    def __init__(self) -> None:
        self.shares: dict[str, SavedShare] = {}
        self.names: list[str] = []
        self.save_groups = SimpleNamespace(remote=self._save)
        self.put_back = SimpleNamespace(remote=self._put_back)

    def _save(self, path: Path, share: SavedShare) -> None:
        assert path.parent.name.startswith(".partial_"), "it counts when all have written"
        path.write_text(json.dumps(len(share.groups)))
        self.shares[path.name] = share

    def _put_back(self, path: Path, name: str) -> SavedShare:
        self.names.append(name)
        return self.shares[path.name]


class Rendezvous:
    """A rendezvous with which controllers meet one after the other."""

    def __init__(self) -> None:
        self.at_meeting: Callable[[], object] = lambda: None
        self.others: list[Any] = []
        """What other controllers bring to every meeting."""

    def gather(self, value: Any) -> list[Any]:
        self.at_meeting()
        return [value, *self.others]

    def seen(self) -> None:
        """This controller waits for the keeper."""

    def sampling_state(self) -> dict[str, Any]:
        return {"order": 7}

    def landed_groups(self) -> list[SavedGroup]:
        return [GroupWork.of(scored(position)).saved() for position in (5, 1)]


class Prompts:
    """Makes prompts, but not of the sample `gone`."""

    def __init__(self) -> None:
        self.gone = -1

    def load(self, slots: Sequence[Slot]) -> tuple[list[Any], list[dict[str, Any]]]:
        bad = [slot for slot in slots if slot.index == self.gone]
        notices = [{"shard": "train-0.tar", "key": f"{slot.index}", "reason": "torn"} for slot in bad]
        return [replace(prompt(slot), fields={"new": 1}) for slot in slots if slot not in bad], notices


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(begun_step, "wait_all", lambda calls, **_: [result for _, result in calls])


def share_of(*positions: int) -> StepShare:
    meter = StepMeter(sums={"n": float(len(positions))}, maxima={"time/rollout_s": 2.5})
    return StepShare(groups=tuple(map(scored, positions)), has_wrong_rewards=False, meter=meter)


class Run:
    """Controllers of a run: each has its own saver."""

    def __init__(
        self, folder: Path, keeper: Keeper, *, num: int = 1, goes_on: bool = False, restart_count: int = 0
    ) -> None:
        self.checkpoints = Checkpoints(root=folder, keep=1)
        self.prompts, self.rendezvous = Prompts(), Rendezvous()
        found = {one.step: one for one in self.checkpoints.begun.after(0, pytest.fail)} if goes_on else {}
        team: Any = SimpleNamespace(
            keeper=keeper, checkpoints=self.checkpoints, run_id="b", restart_count=restart_count
        )
        start: Any = SimpleNamespace(begun=found)
        more: Any = (self.prompts, self.rendezvous, StepMeter())
        config = config_of(f"controllers.num={num}")
        self.savers = [BegunStepSaver(config, team, start, *more, controller=c) for c in range(num)]


@pytest.mark.usefixtures("at_once")
def test_a_step_that_one_controller_must_not_train_is_trained_by_none(tmp_path: Path) -> None:
    """Test a controller without a file: the step was begun by fewer."""
    keeper = Keeper()
    Run(tmp_path, keeper).savers[0].save(1, replace(share_of(0), has_wrong_rewards=True))
    after = Run(tmp_path, keeper, num=2, goes_on=True)
    after.rendezvous.others = [True]
    share = after.savers[1].take(1)
    assert share is not None and not share.groups and share.has_wrong_rewards


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    ("num", "wanted"), [(1, [[0, 1, 2, 4, 5]]), (2, [[0, 2, 4], [1, 5]]), (4, [[0, 4], [1, 5], [2], []])]
)
def test_any_number_of_controllers_goes_on_with_the_groups_of_a_step(
    num: int, wanted: list[list[int]], tmp_path: Path
) -> None:
    keeper = Keeper()
    before = Run(tmp_path, keeper, num=3)
    for saver, positions in reversed([*zip(before.savers, ([4, 0], [1, 5], [2]))]):  # controller 0 commits
        saver.save(1, share_of(*positions))
    assert before.checkpoints.begun.is_whole(1)
    after = Run(tmp_path, keeper, num=num, goes_on=True)
    shares = [saver.take(1) for saver in after.savers]
    assert all(saver.take(2) is None for saver in after.savers)
    found = [[group.prompt.slot.position for group in share.groups] for share in shares if share is not None]
    assert found == wanted
    groups = {group.prompt.slot.position: group for share in shares if share is not None for group in share.groups}
    for position, group in groups.items():
        before_it = scored(position)
        assert (group.rewards, group.group) == (before_it.rewards, before_it.group)
        assert group.prompt.fields == {"new": 1}, "the prompt is made anew from the data set"
    assert sum(share.meter.sums.get("n", 0.0) for share in shares if share is not None) == 5
    assert {name.partition(" (")[0] for name in keeper.names} == {"rollout/b/begun 1"}


@pytest.mark.usefixtures("at_once")
def test_a_sample_that_cannot_be_used_any_more_is_named(tmp_path: Path) -> None:
    keeper = Keeper()
    Run(tmp_path, keeper).savers[0].save(1, share_of(0, 1))
    after = Run(tmp_path, keeper, goes_on=True)
    after.prompts.gone = 1
    with pytest.raises(
        DataError, match=r"sample 1 in train-0.tar cannot be used any more \(torn\).*remove .*/begun_\*"
    ):
        after.savers[0].take(1)


@pytest.mark.usefixtures("at_once")
def test_a_step_that_was_cut_off_goes_on_with_what_its_groups_had(tmp_path: Path) -> None:
    keeper = Keeper()
    begun = GroupWork.of(scored(1))
    cut = GroupWork(prompt=begun.prompt, group=replace(scored(0).group, finish_reasons=("stop", "abort")), num_parts=3)
    cut.prompt = scored(0).prompt
    run, meter = Run(tmp_path, keeper), StepMeter(sums={"genrm/num_judged": 2.0})
    run.savers[0].save_part(1, [], meter, dict)
    assert run.checkpoints.begun.steps() == [], "there is nothing"
    run.savers[0].save_part(1, [cut, begun], meter, lambda: {"order": 8})
    assert not run.checkpoints.begun.is_whole(1)
    after = Run(tmp_path, keeper, goes_on=True)
    assert after.savers[0].take(1) is None, "it is not whole"
    (first, second), so_far = after.savers[0].take_part(1)
    assert (first.is_answered, first.num_parts, first.rewards) == (False, 3, [])
    assert second.scored().rewards == scored(1).rewards and so_far == meter
    assert after.savers[0].take_part(2) == ([], StepMeter())
    after.savers[0].save(1, share_of(0, 1))
    after.savers[0].save_part(1, [cut], meter, dict)
    assert after.checkpoints.begun.is_whole(1), "a part does not take the place of the whole"


@pytest.mark.usefixtures("at_once")
def test_after_a_fault_a_step_goes_on_with_the_groups_that_were_finished_since(tmp_path: Path) -> None:
    keeper = Keeper()
    cut = GroupWork(prompt=scored(1).prompt, group=replace(scored(1).group, finish_reasons=("stop", "abort")))
    other = GroupWork(prompt=scored(3).prompt, group=cut.group)
    Run(tmp_path, keeper).savers[0].save_part(1, [cut, other], StepMeter(), dict)
    after = Run(tmp_path, keeper, goes_on=True, restart_count=1).savers[0]
    works, _ = after.take_part(1)
    assert [work.prompt.slot.position for work in works] == [1, 3, 5]
    assert [work.is_answered for work in works] == [True, False, True], "what is newer counts"
    assert works[0].rewards == [0.0, 1.0]
    assert after.take_part(2) == ([], StepMeter()), "the next step was not begun"
    fresh = Run(tmp_path / "fresh", keeper, restart_count=1).savers[0]
    assert [work.prompt.slot.position for work in fresh.take_part(1)[0]] == [1, 5]


@pytest.mark.usefixtures("at_once")
def test_the_groups_count_before_a_controller_goes_on(tmp_path: Path) -> None:
    run, seen = Run(tmp_path, Keeper()), list[list[int]]()
    run.rendezvous.at_meeting = lambda: seen.append(run.checkpoints.begun.steps())
    run.savers[0].save(1, share_of(0))
    assert seen == [[], [1]], "one meeting before the commit, and one after it"
    assert run.savers[0]._meter.maxima.keys() == {"time/checkpoint_s"}
