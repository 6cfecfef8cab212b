"""Tests of how reward functions are found by name, and of what happens to those that fail."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from tests.yatt_mm import any_reward
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import ConfigError
from yatt_mm.protocol.faults import Fault
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.rewards.call import RewardCall
from yatt_mm.rewards.loading import absolute, load_reward_function
from yatt_mm.rewards.response import Response
from yatt_mm.rewards.worker import RewardWorker


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("exact_match", r"wanted path/to/file.py:name, or module:name"),
        (
            "no_such_module:f",
            "cannot import no_such_module.* looked for in .* and in PYTHONPATH; wanted path/to/",
        ),
        ("no/such/file.py:f", "there is no file /.*/no/such/file.py"),
        (
            "yatt_mm.rewards.functions:nope",
            r"has no function nope; it has \['anls', 'box_iou', 'choice",
        ),
        ("math:sqrt", r"it takes \(x\); wanted \(response, answer, fields\)"),
        (
            "tests.yatt_mm.any_reward:takes_a_secret",
            "takes secret, which nothing is known about; .* conversation, group",
        ),
    ],
)
def test_a_reward_function_that_cannot_be_used_is_refused(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward_function(path)


def score(function: str, *texts: str, deadline_s: float = 5.0) -> GroupRewards:
    """Return a worker's rewards of one group, without a data plane."""
    worker = object.__new__(RewardWorker)
    worker._calls = {function: RewardCall(load_reward_function(function), name=function, deadline_s=deadline_s)}
    task = RewardTask(
        group=cast(Any, None),
        function=function,
        answer="7",
        fields={"hint": 1},
        conversation=ask("?"),
        media=(),
        max_tokens=9,
    )
    responses = [Response(text=text, answer=task.answer, fields=task.fields) for text in texts]
    (rewards,) = worker._score([task], [responses])
    return rewards


def test_what_a_reward_function_cannot_judge_scores_zero_and_is_told_with_its_place() -> None:
    got = score("tests.yatt_mm.any_reward:even_length", "ab", "", "abc", "")
    assert (got.rewards, got.num_errors) == ((1.0, 0.0, 0.0, 0.0), 2)
    assert got.fault is not None
    assert got.fault.what == "ValueError: nothing to judge"
    line = inspect.getsourcelines(any_reward.even_length)[1] + 4
    assert got.fault.where == f"{any_reward.__file__}:{line}"
    assert got.fault.trace.splitlines()[1:] == [
        '    raise ValueError("nothing to judge")',
        "ValueError: nothing to judge",
    ], "the function's own lines, and none of ours"


def test_a_reward_that_is_no_finite_number_scores_zero_and_is_told() -> None:
    got = score("tests.yatt_mm.any_reward:not_a_number", "7")
    what = "it returned nan, a float; wanted a finite number, or a dictionary of finite numbers"
    fault = Fault(what=what, where="tests.yatt_mm.any_reward:not_a_number", response="7")
    assert (got.rewards, got.num_errors, got.fault, got.answers) == ((0.0,), 1, fault, (None,))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("gives_a_pair", r"(1.0, 'right'), a tuple"),
        ("gives_nothing", "None, a NoneType"),
        ("gives_a_dict", "{}, a dict"),
    ],
)
def test_what_is_no_number_is_shown_as_it_is(name: str, shown: str) -> None:
    got = score(f"tests.yatt_mm.any_reward:{name}", "7")
    assert got.fault is not None
    wanted = "a finite number, or a dictionary of finite numbers"
    assert (got.fault.what, got.fault.trace) == (f"it returned {shown}; wanted {wanted}", "")


def test_a_function_may_change_the_fields_that_it_gets() -> None:
    assert score("tests.yatt_mm.any_reward:takes_a_field_away", "7", "8").rewards == (1.0, 1.0)


def test_a_reward_function_that_hangs_is_interrupted_and_told() -> None:
    got = score("tests.yatt_mm.any_reward:endless", "7" * 1000, deadline_s=0.2)
    assert got.num_errors == 1 and got.fault is not None
    assert got.fault.what == "it took longer than 0.2 s (reward.deadline_s)"
    assert got.fault.where.startswith(any_reward.__file__)
    assert got.fault.response == "7" * 200


def test_a_reward_function_may_be_in_a_file_with_another_beside_it(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text(
        "from the_module_beside import VALUE\ndef half(response, answer, fields): return VALUE\n"
    )
    (tmp_path / "the_module_beside.py").write_text("VALUE = 0.5\n")
    path = f"{tmp_path}/my_reward.py:half"
    assert load_reward_function(path)("", "", {}) == 0.5
    with pytest.raises(ConfigError, match=r"has no function whole; it has \['half'\]"):
        load_reward_function(f"{tmp_path}/my_reward.py:whole")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"broken.py raised ZeroDivisionError: division by zero"):
        load_reward_function(f"{tmp_path}/broken.py:half")


def test_a_reward_function_may_be_in_a_module_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_module_of_mine.py").write_text("def one(response, answer, fields): return 1\n")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.chdir(tmp_path)
    assert load_reward_function("a_module_of_mine:one")("", "", {}) == 1


def test_the_path_of_a_file_is_the_same_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("rewards/mine.py:f") == f"{tmp_path}/rewards/mine.py:f"
    assert absolute("a.module:f") == "a.module:f"


def test_a_file_that_ends_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"mine.py raised SystemExit: 3"):
        load_reward_function(f"{tmp_path / 'mine.py'}:score")
