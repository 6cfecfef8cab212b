"""Supervised steps on a small part of the clips, until about half of the held-out clips are answered rightly.

examples/supervised.py has the steps: first the form of an answer, then the right directions with smoothed labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dataplane.media.videos import Video
from examples import supervised
from examples.motion.data import DIRECTIONS, FPS, NUM_FRAMES, QUESTION, Clip, Split
from examples.preparing import Warmup
from models.recipes.media_recipes import VideoSampling
from yatt_mm.common.conversation import ask

TARGET_ACCURACY = 0.5
ACCURACY_RANGE = (0.35, 0.75)
"""The range of held-out accuracies, 0 to 1, in which the warm-up has succeeded. Chance is a quarter."""
NUM_SAMPLES = 400
"""The number of clips for the warm-up, the first of the train split. Reinforcement learning uses all of it."""
NUM_FORM_STEPS = 30
MAX_STEPS = 600
ANSWER_LR = 3e-4
LABEL_SMOOTHING = 0.3
SAMPLING = VideoSampling(fps=FPS, min_frames=NUM_FRAMES, max_frames=NUM_FRAMES)
"""The sampling of frames: all frames of a clip, as in configs/motion_cpu.yaml."""


def warm_up(
    directory: Path,
    split: Split,
    *,
    seed: int = 0,
    target: float = TARGET_ACCURACY,
    on_step: Callable[[int, float], None] = lambda step, accuracy: None,
) -> Warmup:
    """Train the model folder in place, until `target` of the held-out clips are answered rightly.

    Raises:
        WarmupError: the accuracy skips `ACCURACY_RANGE` or does not reach it; the folder is unchanged.
    """
    lessons = supervised.Lessons(
        module="examples/motion/warmup.py",
        conversation=ask(QUESTION, ["video"]),
        answers=tuple(DIRECTIONS),
        target=target,
        accuracy_range=ACCURACY_RANGE,
        num_form_steps=NUM_FORM_STEPS,
        max_steps=MAX_STEPS,
        answer_lr=ANSWER_LR,
        label_smoothing=LABEL_SMOOTHING,
        sampling=SAMPLING,
    )
    return supervised.warm_up(
        directory,
        lessons,
        train=_samples(split.train[:NUM_SAMPLES]),
        held_out=_samples(split.held_out),
        seed=seed,
        on_step=on_step,
    )


def _samples(clips: Sequence[Clip]) -> list[supervised.Sample]:
    return [supervised.Sample(media=(Video(clip.mp4),), answer=clip.answer) for clip in clips]
