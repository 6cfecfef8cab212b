"""Supervised steps on a small part of the clips, until about half of the held-out clips are answered rightly.

As in examples/digits, the form comes first (any direction, then <|im_end|>), then the right directions with smoothed
labels. Patches are made by the data plane's own recipe and token ids by the rollout's own template, so that the model
sees exactly what training will show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from dataplane.media.recipes import parse_recipe
from dataplane.media.videos import Video
from examples.motion.data import DIRECTIONS, FPS, NUM_FRAMES, QUESTION, Clip, Split
from models.recipes.media_recipes import VideoSampling, load_recipes
from models.registry import load_recipe
from models.sequence.media_tokens import TokenLayout, media_spans
from models.sequence.mrope import mrope_positions
from yatt_mm.common.conversation import ask
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import MediumSize, PromptTemplate

TARGET_ACCURACY = 0.5
ACCURACY_RANGE = (0.35, 0.75)
"""The range of held-out accuracies, 0 to 1, in which the warm-up has succeeded. Chance is a quarter."""
NUM_SAMPLES = 400
"""The number of clips for the warm-up, the first of the train split. Reinforcement learning uses all of it."""
BATCH_SIZE = 32
NUM_FORM_STEPS = 30
MAX_STEPS = 600
STEPS_PER_CHECK = 10
FORM_LR = 1e-3
ANSWER_LR = 3e-4
LABEL_SMOOTHING = 0.3
SAMPLING = VideoSampling(fps=FPS, min_frames=NUM_FRAMES, max_frames=NUM_FRAMES)
"""The sampling of frames: all frames of a clip, as in configs/motion_cpu.yaml."""


class WarmupError(RuntimeError):
    """The warm-up did not bring the model into `ACCURACY_RANGE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The result of the warm-up."""

    num_steps: int
    accuracy: float
    """The held-out greedy accuracy of the saved model, 0 to 1: the right direction, then <|im_end|>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Clips that are ready for the model; all have the same prompt."""

    prompt_ids: torch.Tensor
    """[T] token ids of the prompt."""
    positions: torch.Tensor
    """[3, 1, T + 1] the token positions of the prompt and of one token behind it."""
    patches: torch.Tensor
    """[B, N, D] normalised patches."""
    grid_thw: torch.Tensor
    """[1, 3] the grid (t, h, w) of every clip, in patches."""
    answer_ids: torch.Tensor
    """[B] the token id of each right answer."""


def warm_up(
    directory: Path,
    split: Split,
    *,
    seed: int = 0,
    target: float = TARGET_ACCURACY,
    on_step: Callable[[int, float], None] = lambda step, accuracy: None,
) -> Warmup:
    """Train the model folder in place. This runs on one thread, so the result depends only on the seed.

    Raises:
        WarmupError: the accuracy skips `ACCURACY_RANGE` or does not reach it; the folder is unchanged.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        train, held_out = (
            make_batch(directory, model, tokenizer, clips) for clips in (split.train[:NUM_SAMPLES], split.held_out)
        )
        result = _train(model, tokenizer, train, held_out, seed=seed, target=target, on_step=on_step)
        model.save_pretrained(directory)
    finally:
        torch.set_num_threads(num_threads)
    return result


def make_batch(directory: Path, model: PreTrainedModel, tokenizer: Any, clips: Sequence[Clip]) -> _Batch:
    """Return the clips in the form in which training will show them."""
    recipe = load_recipes(directory, SAMPLING).video
    assert recipe is not None
    mean, std = (torch.tensor(values).view(3, 1) for values in load_recipe(directory).pixel_affine(directory))
    made = [_patches(clip, recipe) for clip in clips]
    meta = made[0][1]
    raw = torch.from_numpy(np.stack([patches for patches, _ in made])).float() / 255
    tokens = MediaTokens(image=model.config.image_token_id, video=model.config.video_token_id)
    size = MediumSize(kind="video", num_tokens=meta["num_tokens"])
    prompt = np.array(PromptTemplate(tokenizer, tokens).token_ids(ask(QUESTION, ["video"]), [size]))
    layout = TokenLayout(
        image_token_id=tokens.image,
        video_token_id=model.config.video_token_id,
        merge_size=recipe["merge_size"],
        tokens_per_second=model.config.vision_config.tokens_per_second,
    )
    slots = np.flatnonzero(prompt == layout.video_token_id)
    spans = media_spans(prompt, slots, [tuple(meta["grid_thw"])], [meta["second_per_grid_t"]], layout)
    answers = tokenizer.convert_tokens_to_ids([clip.answer for clip in clips])
    return _Batch(
        prompt_ids=torch.from_numpy(prompt),
        positions=torch.from_numpy(mrope_positions(len(prompt) + 1, spans))[:, None],
        patches=((raw.unflatten(2, (3, -1)) - mean) / std).flatten(2),
        grid_thw=torch.tensor([meta["grid_thw"]]),
        answer_ids=torch.tensor(answers),
    )


@torch.no_grad()
def measure_accuracy(model: PreTrainedModel, batch: _Batch, end_id: int) -> float:
    """Return the share of clips that the model answers, greedily, with the right direction and nothing behind it."""
    first = _logits(model, batch, torch.arange(len(batch.answer_ids)), None)[:, 0].argmax(dim=-1)
    second = _logits(model, batch, torch.arange(len(batch.answer_ids)), first)[:, 1].argmax(dim=-1)
    return ((first == batch.answer_ids) & (second == end_id)).float().mean().item()


def _train(
    model: PreTrainedModel,
    tokenizer: Any,
    train: _Batch,
    held_out: _Batch,
    *,
    seed: int,
    target: float,
    on_step: Callable[[int, float], None],
) -> Warmup:
    direction_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(DIRECTIONS)))
    end_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    accuracy, step = 0.0, 0
    for step in range(1, MAX_STEPS + 1):
        is_form = step <= NUM_FORM_STEPS
        optimizer.param_groups[0]["lr"] = (FORM_LR if is_form else ANSWER_LR) * min(1.0, step / 5)
        chosen = torch.randint(len(train.answer_ids), (BATCH_SIZE,), generator=generator)
        loss = _loss(model, train, chosen, direction_ids, end_id, smoothing=1.0 if is_form else LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not is_form and step % STEPS_PER_CHECK == 0:
            accuracy = measure_accuracy(model, held_out, end_id)
        on_step(step, accuracy)
        if accuracy >= target:
            break
    low, high = ACCURACY_RANGE
    if low <= accuracy <= high:
        return Warmup(num_steps=step, accuracy=accuracy)
    raise WarmupError(
        f"held-out accuracy is {accuracy:.3f} after {step} warm-up steps; wanted {low} to {high}: try another --seed, "
        "or change ANSWER_LR and LABEL_SMOOTHING in examples/motion/warmup.py"
    )


def _loss(
    model: PreTrainedModel,
    batch: _Batch,
    chosen: torch.Tensor,
    direction_ids: torch.Tensor,
    end_id: int,
    *,
    smoothing: float,
) -> torch.Tensor:
    """Return the cross-entropy of the direction, smoothed over all directions, and of the <|im_end|> behind it."""
    answers = batch.answer_ids[chosen]
    logprobs = functional.log_softmax(_logits(model, batch, chosen, answers), dim=-1)
    right = -logprobs[:, 0].gather(1, answers[:, None]).mean()
    any_direction = -logprobs[:, 0, direction_ids].mean()
    end = -logprobs[:, 1, end_id].mean()
    return ((1 - smoothing) * right + smoothing * any_direction + end) / 2


def _logits(model: PreTrainedModel, batch: _Batch, chosen: torch.Tensor, response: torch.Tensor | None) -> torch.Tensor:
    """Return [B, R, V] logits at the prompt's last token and, if there is a response, at its one token."""
    ids = batch.prompt_ids.expand(len(chosen), -1)
    if response is not None:
        ids = torch.cat([ids, response[:, None]], dim=1)
    logits: torch.Tensor = model(
        input_ids=ids,
        position_ids=batch.positions[:, :, : ids.shape[1]].expand(-1, len(chosen), -1),
        pixel_values_videos=batch.patches[chosen].flatten(0, 1),
        video_grid_thw=batch.grid_thw.expand(len(chosen), -1),
        use_cache=False,
        logits_to_keep=1 if response is None else 2,
    ).logits
    return logits


def _patches(clip: Clip, recipe: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the patches, uint8 [N, D], and the meta that the data plane gives with them."""
    plan = parse_recipe(recipe).plan(Video(clip.mp4))
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    return out.reshape(plan.shape), dict(plan.meta)
