"""Tries the reward function once before anything heavy starts, with a training sample's own answer as the response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import Prompt
from yatt_mm.protocol.faults import Fault
from yatt_mm.rewards.call import LATE, RewardCall
from yatt_mm.rewards.loading import load_reward_function
from yatt_mm.rewards.medium import Medium
from yatt_mm.rewards.reading import TOTALS, Reward
from yatt_mm.rewards.response import Response

LONGEST_S = 3.0
"""The time in seconds after which the trial is given up: a slow function is no reason to wait here."""


def try_rewards(client: Client, config: Config, prompts: Mapping[str, Prompt]) -> Iterator[str]:
    """Call the reward function of each set on one of its prompts, and yield warnings: a function fails, or
    `reward.part_weights` or `reward.part_ranges` names what no function returned. `prompts`: by the key of the config
    that names the set."""
    tried = {key: _try_reward(client, config, prompt) for key, prompt in prompts.items()}
    for key, outcome in tried.items():
        if isinstance(outcome, Fault) and LATE not in outcome.what:
            prompt = prompts[key]
            yield (
                f"reward.function {prompt.reward} fails on the first sample of {key}, with its own answer as the "
                f"response: {outcome.what} ({outcome.where}); the sample's fields are "
                f"{', '.join(sorted(prompt.fields))}"
            )
    returned = {name for outcome in tried.values() if isinstance(outcome, Reward) for name in outcome.parts}
    if not tried or any(isinstance(outcome, Fault) for outcome in tried.values()):
        return
    reward = config.reward
    named = {"part_weights": reward.part_weights.keys(), "part_ranges": reward.part_ranges.keys() - {*TOTALS}}
    for key, parts in named.items():
        if not (unknown := sorted(parts - returned)):
            continue
        yield (
            f"reward.{key} names {', '.join(unknown)}, and no reward function returned such a part for the "
            f"first sample of its set; they returned {', '.join(sorted(returned)) or 'no parts'}"
        )


def _try_reward(client: Client, config: Config, prompt: Prompt) -> Reward | Fault:
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
    return tried
