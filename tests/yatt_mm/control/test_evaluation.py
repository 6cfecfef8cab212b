"""Tests of what an evaluation measures of scored responses. What samples and scores them here is a stand-in; the real
ones are in the whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.yatt_mm.control.test_kept_rollouts import scored
from tests.yatt_mm.generation.fakes import config_of
from yatt_mm.control.evaluation import MAX_SOURCES, Evaluation, scores_of
from yatt_mm.generation.group_work import GroupWork
from yatt_mm.protocol.control import ScoredGroup
from yatt_mm.protocol.faults import FUNCTION
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.step_meter import StepMeter, merge

Parts = tuple[float | None, float | None]


def group(
    rewards: tuple[float, float], *, source: object = None, votes: tuple[str, ...] = (), **parts: Parts
) -> ScoredGroup:
    """Return a group of two responses. `source`: the sample's `data_source`."""
    bare = scored(0)
    prompt = replace(bare.prompt, fields={} if source is None else {"data_source": source})
    scores = Scores(source=FUNCTION, values=rewards, parts=parts, votes=votes)
    return replace(bare, prompt=prompt, rewards=rewards, scores=(scores,))


class Meetings:
    """The meetings with one other controller, whose samples have these sources."""

    def __init__(self, *sources: str) -> None:
        self._sources = set(sources)

    def gather(self, mine: Any) -> list[Any]:
        return [mine, self._sources] if isinstance(mine, set) else [mine]


def measured(groups: Sequence[ScoredGroup], *others: str, name: str = "eval", overrides: Sequence[str] = ()) -> Any:
    """Return the metrics of an evaluation of one set. `others`: the sources of the other controller's samples."""
    meter = StepMeter()
    parts: dict[str, Any] = {
        "config": config_of(*overrides),
        "sets": [SimpleNamespace(name=name, num_samples=len(groups))],
        "prompts": SimpleNamespace(load_eval=lambda held_out: ([one.prompt for one in groups], [])),
        "filler": SimpleNamespace(run=lambda entered, of, answered: list(map(GroupWork.of, groups))),
        "rendezvous": Meetings(*others),
        "kept": SimpleNamespace(keep_evaluation=lambda shares, step: None),
        "enter_phase": lambda phase, **_: nullcontext(),
    }
    Evaluation(**parts, meter=meter, tell=lambda notices: None).run(step=3)
    return merge([meter])


@pytest.mark.parametrize("name", ["accuracy", "acc"])
def test_the_part_accuracy_says_how_right_a_response_is_and_the_reward_only_without_it(name: str) -> None:
    assert scores_of(group((1.5, 0.5), **{name: (1.0, None)}, format=(0.5, 0.5))) == (1.0, 0.0)
    assert scores_of(group((1.5, 0.5), format=(0.5, 0.5))) == (1.5, 0.5)


def test_accuracy_is_measured_by_its_part_and_other_parts_have_their_means() -> None:
    right, wrong = group((1.5, 0.5), accuracy=(1.0, None), format=(0.5, 0.5)), group((0.5, 0.5), accuracy=(0.0, 0.0))
    found = measured([right, wrong, wrong, wrong])
    assert found["eval/accuracy"] == 0.5 / 4
    assert found["eval/format/mean"] == 0.5
    assert found["eval/num_samples"] == 8
    assert "eval/accuracy/mean" not in found


def test_a_set_with_a_name_has_its_own_metrics_of_its_scores_and_votes() -> None:
    charts = "{path: x.tar, num_samples: 2, temperature: 1, metrics: [pass@2, maj@2, mean@1]}"
    first = group((9.0, 9.0), acc=(1.0, 0.0), votes=("7", "8"))
    second = group((9.0, 9.0), acc=(0.0, 1.0), votes=("7", "7"))
    found = measured([first, second], name="charts", overrides=("data.eval=null", f"eval.sets.charts={charts}"))
    wanted = {"accuracy": 0.5, "pass@2": 1.0, "maj@2": 0.5, "mean@1": 0.5, "num_samples": 4}
    assert {name: found[f"eval/charts/{name}"] for name in wanted} == wanted
    assert found["eval/accuracy"] == 0.5, "without data.eval that of all sets together"


def test_each_source_has_its_own_metrics_if_there_are_several() -> None:
    groups = [group((1.0, 1.0), source="a"), group((1.0, 0.0), source="b"), group((0.0, 0.0), source="b")]
    found = measured([*groups, group((0.0, 0.0), source=7)])
    assert {name: value for name, value in found.items() if "/source/" in name} == {
        "eval/source/a/accuracy": 1.0,
        "eval/source/b/accuracy": 0.25,
    }


@pytest.mark.parametrize(("num", "is_apart"), [(1, False), (2, True), (MAX_SOURCES, True), (MAX_SOURCES + 1, False)])
def test_sources_are_counted_over_all_controllers(num: int, is_apart: bool) -> None:
    found = measured([group((1.0, 0.0), source="0")], *map(str, range(num)))
    assert ("eval/source/0/accuracy" in found) == is_apart
