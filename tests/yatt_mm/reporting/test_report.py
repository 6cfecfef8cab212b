"""Tests of what people see of a run."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.yatt_mm.keeper.rows import picture, row
from yatt_mm.common.errors import RewardError
from yatt_mm.keeper.table import kept_steps, table_path, write_rows
from yatt_mm.reporting.report import Reporter


def shown(folder: Path, *records: dict[str, Any], first_step: int = 0) -> str:
    """Return what the console shows of these records."""
    with Reporter(folder, num_steps=2, first_step=first_step, judges=(), console=(console := on_paper())) as reporter:
        for record in records:
            reporter.take(record)
    return written(console)


def on_paper() -> Console:
    return Console(file=io.StringIO(), width=80)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def step(number: int, has_advantage_frac: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "reward/mean": 0.25, "reward/has_advantage_frac": has_advantage_frac}


def test_steps_without_signal_are_told_once_in_a_row_and_a_run_without_any_has_failed(tmp_path: Path) -> None:
    with Reporter(tmp_path, num_steps=9, first_step=0, judges=(), console=(console := on_paper())) as reporter:
        reporter.take({"kind": "step", "step": 0, "eval/accuracy": 0.5})
        reporter.learning.finish()
        for number in range(1, 6):
            reporter.take(step(number, 0.0))
        text = written(console)
        told = "no signal: in the last 3 steps no group had two rewards that differ at all, and the mean was 0.25;"
        assert text.count("no signal") == text.count(told) == 1
        with pytest.raises(RewardError, match=r"nothing was learned: in 5 steps no group had two rewards that differ"):
            reporter.learning.finish()
        for number, share in ((6, 0.5), (7, 0.0), (8, 0.0), (9, 0.0)):
            reporter.take(step(number, share))
        assert written(console).count("no signal") == 2
        reporter.learning.finish()


def test_a_run_whose_judge_never_gave_a_verdict_has_failed(tmp_path: Path) -> None:
    with Reporter(tmp_path, num_steps=2, first_step=0, judges=("a", "b"), console=(console := on_paper())) as reporter:
        reporter.take(step(1, 1.0) | {"genrm/a_failed_frac": 1.0, "genrm/b_failed_frac": 1.0, "genrm/num_failed": 8})
        reporter.take(step(2, 1.0) | {"genrm/a_failed_frac": 0.9, "genrm/b_failed_frac": 1.0, "genrm/num_failed": 7})
        assert "failed 8" in (text := written(console))
        assert "failed 7" in text and reporter.num_without_score == 15
        with pytest.raises(RewardError, match=r"judge b gave no verdict in 2 steps, so each response scored"):
            reporter.learning.finish()


def test_a_failure_of_the_reward_function_is_shown_with_its_traceback(tmp_path: Path) -> None:
    text = shown(
        tmp_path,
        {
            "kind": "failure",
            "who": "reward.function my.py:f",
            "score": "0",
            "what": "ValueError: [a]",
            "where": "my.py:3",
            "response": "[bold]7",
            "trace": '  File "my.py", line 3, in f\n    raise ValueError("[a]")\nValueError: [a]\n',
            "num_failed": 4,
            "num_responses": 20,
            "among": "step 1",
        },
        {"kind": "step", "step": 1, "reward/mean": 0.5, "reward/num_errors": 4.0},
        {"kind": "step", "step": 2, "reward/mean": 0.5, "reward/num_errors": 0.0},
    )
    wanted = (
        "no score: reward.function my.py:f failed on 4 of the 20 responses of step 1, which score 0. "
        "The first of them: '[bold]7'. ValueError: [a] (my.py:3)\n"
        '  File "my.py", line 3, in f\n    raise ValueError("[a]")\nValueError: [a]\n'
    )
    assert wanted in text
    assert "step    1  reward 0.500  failed 4\n" in text
    assert "step    2  reward 0.500\n" in text


def test_a_judges_server_that_is_away_is_told_once_and_so_is_its_return(tmp_path: Path) -> None:
    def record(is_away: bool, by: str, judge: str = "far") -> dict[str, object]:
        word = "gives no reply" if is_away else "replies again"
        return {"kind": "server", "judge": judge, "is_away": is_away, "text": f"[{judge}] {word} to {by}"}

    text = shown(tmp_path, *(record(True, by) for by in "ab"), *(record(False, by) for by in "ba"), record(True, "a"))
    lines = [line for line in text.splitlines() if "[far]" in line]
    assert lines == [
        "waiting: [far] gives no reply to a",
        "back: [far] replies again to b",
        "waiting: [far] gives no reply to a",
    ]
    assert "[near]" in shown(tmp_path, record(True, "a"), record(True, "a", "near"))


def accumulated(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    return events


def texts(events: EventAccumulator, name: str) -> dict[int, str]:
    return {event.step: event.tensor_proto.string_val[0].decode() for event in events.Tensors(name)}


def test_tensorboard_has_the_metrics_and_what_the_model_said_with_its_pictures(tmp_path: Path) -> None:
    code = "| a | `b` |\n# not a title"
    rows = [row(5, place, reward=float(place), response=code, answer="`x`\n\n<b>") for place in range(2)]
    write_rows(table_path(tmp_path, 1), [*rows, row(0, 0, split="eval", media=[])])
    with Reporter(tmp_path, num_steps=2, first_step=1, judges=(), console=on_paper()) as reporter:
        reporter.take(step(1, 1.0))
    events = accumulated(tmp_path)
    assert events.Tensors("reward/mean")[0].tensor_proto.float_val[0] == 0.25
    (text,) = texts(events, "rollouts/train").values()
    assert text.index("reward 1.000") < text.index("reward 0.000"), "the best first"
    for block in ("    | a | `b` |\n    # not a title", "    `x`\n    \n    <b>"):
        assert block in text, "Markdown changes nothing in it"
    width, height, image = events.Tensors("rollouts/train prompt 1")[0].tensor_proto.string_val
    assert (int(width), int(height), image) == (96, 96, picture(5))
    assert "rollouts/eval" in events.Tags()["tensors"] and "rollouts/eval prompt 1" not in events.Tags()["tensors"]


def test_a_run_that_is_resumed_shows_the_steps_before_and_drops_the_rollouts_of_those_after(tmp_path: Path) -> None:
    with Reporter(tmp_path, num_steps=3, first_step=0, judges=(), console=on_paper()) as reporter:
        for number in (1, 2, 3):
            write_rows(table_path(tmp_path, number), [row(0, 0, response=f"at {number}")])
            reporter.take(step(number, 1.0))
    with Reporter(tmp_path, num_steps=3, first_step=2, judges=(), console=on_paper()):
        pass
    assert kept_steps(tmp_path) == [1, 2]
    found = texts(accumulated(tmp_path), "rollouts/train")
    assert {number: f"at {number}" in text for number, text in found.items()} == {1: True, 2: True}


def test_the_records_of_a_run_that_is_resumed_are_replaced_as_a_whole_and_only_where_later_ones_go(
    tmp_path: Path,
) -> None:
    with Reporter(tmp_path, num_steps=3, first_step=0, judges=(), console=on_paper()) as reporter:
        for number in (1, 2, 3):
            reporter.take(step(number, 1.0))
    path, found = tmp_path / "metrics.jsonl", []
    with path.open() as before:  # which keeps its inode
        for first_step in (3, 2):
            with Reporter(tmp_path, num_steps=3, first_step=first_step, judges=(), console=on_paper()):
                steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
            found.append((steps, os.path.samestat(path.stat(), os.fstat(before.fileno()))))
    assert found == [([1, 2, 3], True), ([1, 2], False)]


def test_means_of_function_and_judges_stand_beside_the_reward(tmp_path: Path) -> None:
    scores = {"reward/function_mean": 0.5, "genrm/num_judged": 64, "genrm/tiny_mean": 0.00052}
    text = shown(tmp_path, step(1, 1.0) | scores)
    assert "reward 0.250  function 0.5  tiny 0.00052" in text and "num" not in text


def test_a_file_of_rollouts_that_is_broken_is_told_and_stops_no_run(tmp_path: Path) -> None:
    write_rows(table_path(tmp_path, 1), [row(0, 0)])
    table_path(tmp_path, 1).write_bytes(b"")
    text = shown(tmp_path, step(1, 1.0), first_step=1)
    assert f"warning: {table_path(tmp_path, 1)} cannot be read: " in "".join(text.splitlines())


def test_samples_that_are_left_out_do_not_flood_the_console_and_failures_of_an_evaluation_count(tmp_path: Path) -> None:
    notice = {"kind": "quarantine", "step": 0, "shard": "s", "reason": "torn"}
    notices = [{**notice, "key": f"k{at}", "is_filtered": False} for at in range(40)]
    notices += [{**notice, "key": f"f{at}", "is_filtered": True} for at in range(3)]
    evaluation = {"kind": "step", "step": 0, "eval/accuracy": 0.5, "eval/num_errors": 3, "reward/num_errors": 0}
    text = shown(tmp_path, *notices, evaluation)
    assert text.count("quarantined") == 6 and "k4 in s: torn" in text and "k5 in s" not in text
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 43
    assert "f0" not in text
    assert "held-out 0.500" in text and "failed 3" in text
