"""Tries the reward function once before anything heavy starts, with a training sample's own answer as the response."""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.client.client import Client
from yatt_mm.common.sample_fields import read_answer, take_field
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.faults import Fault
from yatt_mm.rewards.call import LATE, RewardCall
from yatt_mm.rewards.loading import load_reward_function

LONGEST_S = 3.0
"""The time in seconds after which the trial is given up: a slow function is no reason to wait here."""


def failure_on_a_sample(client: Client, config: Config, name: str) -> Iterator[str]:
    """Yield a warning if the reward function fails on the first sample of the data set `name`."""
    sample, function = client.samples(name, [0])[0], config.reward.function
    if sample.bad:
        return
    try:
        answer = read_answer(take_field(sample.fields, config.data.answer_field), config.data.answer_field)
    except ValueError:
        return
    tried = RewardCall(load_reward_function(function), name=function, deadline_s=LONGEST_S)
    found = tried(answer, answer, sample.fields)
    if isinstance(found, Fault) and LATE not in found.what:
        yield (
            f"reward.function {function} fails on the first training sample, with its own answer as the response: "
            f"{found.what} ({found.where}); the sample's fields are {', '.join(sorted(sample.fields))}"
        )
