"""A reward function that kills the run's data-plane node after a given number of responses. Its scores are those of
any_reward.

A reward function is called in the middle of a run's generation, and the last call of a step comes right before its
training. No other place in a run that a test can reach gives the moment as exactly.
"""

import os
import signal
from collections.abc import Mapping
from typing import Any

from tests.yatt_mm.any_reward import even_length
from tests.yatt_mm.runs import wait_for_process

VARIABLE = "YATT_TEST_KILL_AT"
"""The numbers of the responses at which the node is killed, counted from 1 over the whole run, separated by commas."""

_num_scored = 0


def even_length_after_a_kill(response: str, answer: str, fields: Mapping[str, Any]) -> float:
    """Score like `even_length`, but kill the node first if this is one of the responses in `VARIABLE`."""
    global _num_scored
    _num_scored += 1
    if str(_num_scored) in os.environ[VARIABLE].split(","):
        mark = f"YATT_TEST_MARK={os.environ['YATT_TEST_MARK']}"
        os.kill(wait_for_process(mark, "--embedded", deadline_s=20), signal.SIGKILL)
    return even_length(response, answer, dict(fields))
