"""Tries the reward function once before anything heavy starts, with a training sample's own answer as the response."""

from __future__ import annotations

from collections.abc import Iterator

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import Prompt
from yatt_mm.protocol.faults import Fault
from yatt_mm.rewards.call import LATE, RewardCall
from yatt_mm.rewards.loading import load_reward_function
from yatt_mm.rewards.medium import Medium
from yatt_mm.rewards.response import Response

LONGEST_S = 3.0
"""The time in seconds after which the trial is given up: a slow function is no reason to wait here."""


def failure_on_a_prompt(client: Client, config: Config, key: str, prompt: Prompt) -> Iterator[str]:
    """Yield a warning if the reward function fails on a prompt of the set that the config's `key` names."""
    with Reader(client.uri, timeout_s=config.dataplane.timeout_s) as reader:
        response = Response(
            text=prompt.answer,
            answer=prompt.answer,
            fields=prompt.fields,
            conversation=prompt.conversation.messages(),
            group=[prompt.answer],
            media=[Medium(ref, client, reader) for ref in prompt.media],
            num_tokens=1,
            max_tokens=config.rollout.max_tokens,
        )
        function = load_reward_function(prompt.reward)
        (tried,) = RewardCall(function, name=prompt.reward, deadline_s=LONGEST_S)([response])
    if isinstance(tried, Fault) and LATE not in tried.what:
        yield (
            f"reward.function {prompt.reward} fails on the first sample of {key}, with its own answer as the "
            f"response: {tried.what} ({tried.where}); the sample's fields are {', '.join(sorted(prompt.fields))}"
        )
