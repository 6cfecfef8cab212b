"""A reward function that kills the run's data-plane node after so many responses; its scores are those of any_reward.

Rewards are asked for in the middle of a run's generation, and the last one of a step right before its training: no
other place in a run that a test can reach tells the moment as exactly.
"""

import os
import signal
from collections.abc import Mapping
from typing import Any

from tests.yatt_mm.any_reward import even_length
from tests.yatt_mm.runs import wait_for_process

VARIABLE = "YATT_TEST_KILL_AT"
"""Numbers of responses, counted from 1 over the whole run, separated by commas."""

_num_scored = 0


def even_length_after_a_kill(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Score like `even_length`, but kill the node first when its time has come."""
    global _num_scored
    _num_scored += 1
    if str(_num_scored) in os.environ[VARIABLE].split(","):
        mark = f"YATT_TEST_MARK={os.environ['YATT_TEST_MARK']}"
        os.kill(wait_for_process(mark, "--embedded", deadline_s=20), signal.SIGKILL)
    return even_length(response, answer, dict(fields))
