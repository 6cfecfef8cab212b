"""The prompts of a simulated run: lengths of responses and verdicts, and whether the rewards of a group differ.

Everything follows from (seed, position), so all layouts work on the same prompts, in whatever order these end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.lengths import draw_lengths

BLOCK = 256
"""The number of prompts that are drawn together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPrompt:
    """The lengths and the signal of one prompt."""

    position: int
    response_lengths: tuple[int, ...]
    """[G] the number of tokens of each response."""
    verdict_lengths: tuple[tuple[int, ...], ...]
    """[G][verdicts per response] before drift."""
    has_signal: bool


class Workload:
    """The simulated prompts, by their position in the run's order."""

    def __init__(self, config: SimulationConfig) -> None:
        self._work = config.workload
        self._seed = config.run.seed
        self._num_steps = config.run.steps
        self._blocks: dict[int, list[SimulatedPrompt]] = {}

    def prompt(self, position: int) -> SimulatedPrompt:
        """Return the prompt at a place of the run's order."""
        block = position // BLOCK
        if block not in self._blocks:
            self._blocks[block] = self._draw(block)
        return self._blocks[block][position % BLOCK]

    def verdict_scale(self, step: int) -> float:
        """Return the factor of verdict lengths in a step (0 is the first)."""
        if self._num_steps == 1:
            return 1.0
        return float(self._work.drift.value ** (step / (self._num_steps - 1)))

    def _draw(self, block: int) -> list[SimulatedPrompt]:
        work = self._work
        random = np.random.default_rng([self._seed, block])
        size, repeats = work.group_size, work.verdicts_per_response
        responses = draw_lengths(
            work.response,
            np.broadcast_to(random.standard_normal((BLOCK, 1)), (BLOCK, size)),
            random.standard_normal((BLOCK, size)),
        )
        verdicts = draw_lengths(
            work.verdict,
            np.broadcast_to(random.standard_normal((BLOCK, 1, 1)), (BLOCK, size, repeats)),
            random.standard_normal((BLOCK, size, repeats)),
        )
        signals = random.random(BLOCK) < work.signal_frac.value
        return [
            SimulatedPrompt(
                position=block * BLOCK + i,
                response_lengths=tuple(responses[i].tolist()),
                verdict_lengths=tuple(map(tuple, verdicts[i].tolist())),
                has_signal=bool(signals[i]),
            )
            for i in range(BLOCK)
        ]
