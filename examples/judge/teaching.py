"""Trains a model folder to be a judge, supervised: first it learns to read digits, then to compare them with answers.

A model that cannot read learns almost nothing from yes and no, so reading comes first. Matrices are trained with Muon,
which needs fewer steps here than AdamW. The held-out scans are only used to measure. The questions are in `lessons`.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText

from examples.digits.data import DigitSample, Split
from examples.digits.model import load_processor
from examples.judge.lessons import Lesson, judging, reading
from examples.judge.muon import Muon

MIN_ACCURACY = 0.97
"""The minimum held-out accuracy, 0 to 1, of a judge."""
NUM_READING_STEPS = 200
NUM_JUDGING_STEPS = 350
BATCH_SIZE = 32
"""The number of scans in a step. When judging, each is shown with a right and with a wrong answer."""
LR = 1e-3
NUM_LR_WARMUP_STEPS = 10
MAX_GRAD_NORM = 1.0
MEASURE_EVERY = 50

OnStep = Callable[[str, int, float], None]
"""A function that gets the stage, the number of steps done over all stages, and the stage's latest held-out
accuracy."""


class TeachingError(RuntimeError):
    """The judge is wrong too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """How long the judge was taught, and how well it does on held-out scans."""

    num_steps: int
    reading_accuracy: float
    """The share of held-out scans that the model could read after the first stage."""
    accuracy: float
    """The share of held-out pairs of a scan and an answer on which its yes or no is right; half of the answers are
    right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scans:
    """Scans that are ready for the model."""

    patches: torch.Tensor
    """[N, num_patches, C * T * P * P] normalised patches."""
    grid_thw: torch.Tensor
    """[N, 3] the grid (t, h, w) of each scan, in patches."""
    digits: tuple[str, ...]
    """[N] the right digit of each scan."""


def teach(
    directory: Path,
    split: Split,
    *,
    seed: int = 0,
    on_step: OnStep = lambda stage, num_steps, accuracy: None,
) -> Taught:
    """Train the model folder in place. This runs on one thread, so the result depends only on the seed.

    Raises:
        TeachingError: the judge ends below `MIN_ACCURACY`; the folder is unchanged.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pupil = _Pupil(directory)
        reading_accuracy, accuracy = _teach(pupil, split, random.Random(seed), on_step)
        if accuracy < MIN_ACCURACY:
            raise TeachingError(
                f"the judge is right on {accuracy:.3f} of the held-out answers after {NUM_JUDGING_STEPS} steps; wanted "
                f"{MIN_ACCURACY}: try another --seed, or raise NUM_JUDGING_STEPS in examples/judge/teaching.py"
            )
        pupil.model.save_pretrained(directory)
    finally:
        torch.set_num_threads(num_threads)
    num_steps = NUM_READING_STEPS + NUM_JUDGING_STEPS
    return Taught(num_steps=num_steps, reading_accuracy=reading_accuracy, accuracy=accuracy)


def _teach(pupil: _Pupil, split: Split, rng: random.Random, on_step: OnStep) -> tuple[float, float]:
    """Train both stages. Return their held-out accuracies."""
    train, held_out = pupil.look_at(split.train), pupil.look_at(split.held_out)
    everything = range(len(held_out.digits))
    reading_exam = reading(held_out.digits, everything)
    judging_exam = judging(held_out.digits, everything, pupil.pieces, rng)

    def draw() -> list[int]:
        return rng.choices(range(len(train.digits)), k=BATCH_SIZE)

    def stage(name: str, num_steps: int, num_before: int, lesson: Callable[[], Lesson], exam: Lesson) -> float:
        accuracy = 0.0
        optimizers = pupil.optimizers()
        for step in range(num_steps):
            share = min(1, (step + 1) / NUM_LR_WARMUP_STEPS) * (1 - step / num_steps)
            pupil.learn(train, lesson(), optimizers, lr=LR * share)
            if (step + 1) % MEASURE_EVERY == 0 or step + 1 == num_steps:
                accuracy = pupil.accuracy(held_out, exam)
            on_step(name, num_before + step + 1, accuracy)
        return accuracy

    read = stage("reading", NUM_READING_STEPS, 0, lambda: reading(train.digits, draw()), reading_exam)
    judged = stage(
        "judging",
        NUM_JUDGING_STEPS,
        NUM_READING_STEPS,
        lambda: judging(train.digits, draw(), pupil.pieces, rng),
        judging_exam,
    )
    return read, judged


class _Pupil:
    """The model of a folder, with its processor."""

    def __init__(self, directory: Path) -> None:
        self._processor = load_processor(directory)
        self._tokenizer = self._processor.tokenizer
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        specials = set(self._tokenizer.all_special_ids)
        self.pieces = [self._tokenizer.decode(token) for token in range(len(self._tokenizer)) if token not in specials]
        """The text of every ordinary token."""

    def look_at(self, samples: Sequence[DigitSample]) -> _Scans:
        """Return the patches of the samples' scans."""
        images = [Image.open(io.BytesIO(sample.png)) for sample in samples]
        inputs = self._processor.image_processor(images, return_tensors="pt")
        return _Scans(
            patches=inputs["pixel_values"].unflatten(0, (len(samples), -1)),
            grid_thw=inputs["image_grid_thw"],
            digits=tuple(sample.answer for sample in samples),
        )

    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """Return new optimizers: Muon for the layers' matrices, AdamW for the rest."""
        matrices, rest = [], []
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.ndim == 2 and (".layers." in name or ".blocks." in name)
            (matrices if is_matrix else rest).append(parameter)
        return (
            Muon(matrices),
            torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def learn(self, scans: _Scans, lesson: Lesson, optimizers: Sequence[torch.optim.Optimizer], *, lr: float) -> None:
        """Take one training step."""
        loss = functional.cross_entropy(self._logits(scans, lesson), self._answer_ids(lesson))
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

    @torch.no_grad()
    def accuracy(self, scans: _Scans, lesson: Lesson) -> float:
        """Return the share of the questions on which the likeliest token is the answer."""
        return (self._logits(scans, lesson).argmax(dim=-1) == self._answer_ids(lesson)).float().mean().item()

    def _answer_ids(self, lesson: Lesson) -> torch.Tensor:
        return torch.tensor(self._tokenizer.convert_tokens_to_ids(list(lesson.answers)))

    def _logits(self, scans: _Scans, lesson: Lesson) -> torch.Tensor:
        """Return [B, V] logits of the first token of the response."""
        num_image_tokens = scans.patches.shape[1] // self._processor.image_processor.merge_size**2
        texts = [self._prompt(question, num_image_tokens) for question in lesson.questions]
        inputs = self._tokenizer(
            texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
        )
        places = list(lesson.scans)
        logits: torch.Tensor = self.model(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            mm_token_type_ids=(inputs["input_ids"] == self.model.config.image_token_id).int(),
            pixel_values=scans.patches[places].flatten(0, 1),
            image_grid_thw=scans.grid_thw[places],
            use_cache=False,
            logits_to_keep=1,
        ).logits
        return logits[:, 0]

    def _prompt(self, question: str, num_image_tokens: int) -> str:
        content: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": question}]
        text: str = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return text.replace("<|image_pad|>", "<|image_pad|>" * num_image_tokens)
