"""Reward functions that kill a process of their run at a given moment.

A reward function is called in the middle of a run's generation, and the last call of a step comes right before its
training. No other place in a run that a test can reach gives the moment as exactly.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.yatt_mm.runs import wait_for_process
from yatt_mm.rewards.functions import exact_match

NODE_AT = "YATT_TEST_KILL_NODE_AT"
"""The numbers of the responses at which the node is killed, counted from 1 over the whole run, separated by commas."""
RANK_WHEN = "YATT_TEST_KILL_RANK_WHEN"
"""The folder of a checkpoint that is being saved: a training rank is killed as soon as this folder exists."""
POLL_S = 0.0005

_num_scored = 0


def exact_match_with_kills(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Score like `exact_match`, but kill the node, or a training rank, first if this is the moment for it."""
    global _num_scored
    _num_scored += 1
    mark = f"YATT_TEST_MARK={os.environ['YATT_TEST_MARK']}"
    if _num_scored == 1:
        threading.Thread(target=_kill_a_rank, args=(mark, Path(os.environ[RANK_WHEN])), daemon=True).start()
    if str(_num_scored) in os.environ[NODE_AT].split(","):
        os.kill(wait_for_process(mark, "--embedded", deadline_s=20), signal.SIGKILL)
    return exact_match(response, answer, dict(fields))


def _kill_a_rank(mark: str, when: Path) -> None:
    rank = wait_for_process(mark, "ray::TrainActor", deadline_s=20)
    while not when.is_dir():  # the save takes a tenth of a second
        time.sleep(POLL_S)
    os.kill(rank, signal.SIGKILL)
