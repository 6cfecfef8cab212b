"""Tries the reward function once before anything heavy starts, with a training sample's own answer as the response."""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.client.client import Client
from yatt_mm.preflight.run_sets import FoundSet
from yatt_mm.protocol.faults import Fault
from yatt_mm.rewards.call import LATE, RewardCall
from yatt_mm.rewards.loading import load_reward_function

LONGEST_S = 3.0
"""The time in seconds after which the trial is given up: a slow function is no reason to wait here."""


def failure_on_a_sample(client: Client, found: FoundSet) -> Iterator[str]:
    """Yield a warning if the reward function of a set fails on its first sample."""
    run_set = found.run_set
    sample = client.samples(run_set.dataset, [0])[0]
    if sample.bad:
        return
    try:
        answer = run_set.layout.answer_of(sample.fields)
    except ValueError:
        return
    tried = RewardCall(load_reward_function(run_set.reward), name=run_set.reward, deadline_s=LONGEST_S)
    failure = tried(answer, answer, sample.fields)
    if isinstance(failure, Fault) and LATE not in failure.what:
        yield (
            f"reward.function {run_set.reward} fails on the first sample of {found.key}, with its own answer as the "
            f"response: {failure.what} ({failure.where}); the sample's fields are {', '.join(sorted(sample.fields))}"
        )
