"""What a controller does about steps whose update was skipped: because the loss or its gradient was not finite, or
because a reward was out of `reward.range`. They are counted, written down, and too many in a row end the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.common.errors import TrainingError
from yatt_mm.common.writing import writing
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.control import ScoredGroup

MAX_KEPT = 10
"""The most steps whose folders stay."""


class SkippedSteps:
    """The steps of a run that were skipped. Every controller calls its methods at the same moments."""

    def __init__(self, config: Config, folder: Path, rendezvous: RendezvousClient, *, controller: int) -> None:
        """`folder`: gets a folder for each step that is skipped."""
        self._config = config
        self._folder = folder
        self._rendezvous = rendezvous
        self._controller = controller
        self._num_in_a_row = 0

    def has_wrong_rewards(self, groups: Sequence[ScoredGroup]) -> bool:
        """Return True if a reward of the step, of any controller, is out of `reward.range`."""
        if self._config.reward.range is None:
            return False
        low, high = self._config.reward.range
        is_wrong = any(not low <= reward <= high for group in groups for reward in group.rewards)
        return any(self._rendezvous.gather(is_wrong))

    def note(self, step: int, groups: Sequence[ScoredGroup], *, why: str) -> None:
        """Take a step's end. `groups`: those that this controller gave to its ranks. `why` its update was skipped, in
        part or in whole; empty if it was not.

        Raises:
            TrainingError: too many steps in a row were skipped.
        """
        if not why:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        folder = self._folder / f"step_{step:06d}"
        self._write(folder, groups)
        if self._controller == 0:
            for old in sorted(self._folder.glob("step_*"))[:-MAX_KEPT]:
                shutil.rmtree(old)
            self._rendezvous.put_record({"kind": "skipped", "step": step, "why": why, "folder": str(folder)})
        most = self._config.faults.max_skipped_steps
        if self._num_in_a_row > most:
            self._rendezvous.gather(None)  # the run ends with the first controller that raises
            raise TrainingError(
                f"{self._num_in_a_row} steps in a row were skipped, and faults.max_skipped_steps is {most}; the last "
                f"one because {why}. {folder} holds what it was computed from. No such update is in the weights: lower "
                "train.lr or train.clip_grad, or correct the rewards, and go on with --resume"
            )

    def _write(self, folder: Path, groups: Sequence[ScoredGroup]) -> None:
        path = folder / f"groups-{self._controller}.jsonl"
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(_line(group), default=str) + "\n" for group in groups))


def _line(group: ScoredGroup) -> dict[str, Any]:
    prompt = group.prompt
    return {
        **asdict(prompt.slot),
        "prompt": prompt.conversation.messages(),
        "answer": prompt.answer,
        "media": [
            {"digest": ref.name, "lineage": asdict(ref.lineage) if ref.lineage else None} for ref in prompt.media
        ],
        "rewards": group.rewards,
        "scores": [asdict(scores) for scores in group.scores],
        "lengths": group.group.lengths,
        "finish_reasons": group.group.finish_reasons,
        "policy_versions": group.group.policy_versions,
    }
