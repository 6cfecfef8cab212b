"""The supervised steps of the examples whose samples all have the same prompt and an answer of one token.

The form comes first (any answer, then <|im_end|>), then the right answers with smoothed labels, as in
examples/digits/warmup.py. Patches are made by the data plane's own recipes and token ids by the rollout's own
template, so that the model sees exactly what training will show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from dataplane.media.recipes import parse_recipe
from dataplane.media.videos import Video
from examples.preparing import Warmup, WarmupError
from models.recipes.media_recipes import VideoSampling, load_recipes
from models.registry import load_recipe
from models.sequence.media_tokens import media_spans, qwen_token_layout
from models.sequence.mrope import mrope_positions
from yatt_mm.common.conversation import Conversation
from yatt_mm.rollout.engine_types import MediaTokens
from yatt_mm.rollout.prompt_template import MediumSize, PromptTemplate

BATCH_SIZE = 32
STEPS_PER_CHECK = 10
FORM_LR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """What a warm-up teaches, and until when."""

    module: str
    """The file with the settings, for errors."""
    conversation: Conversation
    """The conversation of every sample."""
    answers: tuple[str, ...]
    """All possible answers. Each is one token."""
    target: float
    """The held-out accuracy, 0 to 1, at which the steps end."""
    accuracy_range: tuple[float, float]
    """The range of held-out accuracies in which the warm-up has succeeded."""
    num_form_steps: int
    max_steps: int
    answer_lr: float
    label_smoothing: float
    """The share of the loss, 0 to 1, that goes to all answers alike."""
    sampling: VideoSampling = field(default_factory=VideoSampling)
    """The sampling of frames of videos, as in the config of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Media with the right answer."""

    media: tuple[Image.Image | Video, ...]
    """The decoded media, in the order of the conversation. Images are RGB."""
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples that are ready for the model; all have the same prompt and media of the same sizes."""

    prompt_ids: torch.Tensor
    """[T] token ids of the prompt."""
    positions: torch.Tensor
    """[3, 1, T + 1] the token positions of the prompt and of one token behind it."""
    patches: torch.Tensor
    """[B, N, D] normalised patches; N counts those of all media of a sample."""
    grid_thw: torch.Tensor
    """[M, 3] the grid (t, h, w) of each medium of a sample, in patches."""
    answer_ids: torch.Tensor
    """[B] the token id of each right answer."""
    is_video: bool
    """True if all media are videos; otherwise all are images."""


def warm_up(
    directory: Path,
    lessons: Lessons,
    *,
    train: Sequence[Sample],
    held_out: Sequence[Sample],
    seed: int,
    on_step: Callable[[int, float], None],
) -> Warmup:
    """Train the model folder in place. `on_step` gets the number of steps done and the latest held-out accuracy. This
    runs on one thread, so the result depends only on the seed.

    Raises:
        WarmupError: the accuracy skips `accuracy_range` or does not reach it; the folder is unchanged.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        batches = [make_batch(directory, model, tokenizer, lessons, samples) for samples in (train, held_out)]
        result = _train(model, tokenizer, lessons, *batches, seed=seed, on_step=on_step)
        model.save_pretrained(directory)
    finally:
        torch.set_num_threads(num_threads)
    return result


def make_batch(
    directory: Path, model: PreTrainedModel, tokenizer: Any, lessons: Lessons, samples: Sequence[Sample]
) -> Batch:
    """Return the samples in the form in which training will show them."""
    kinds = lessons.conversation.kinds
    recipes = load_recipes(directory, lessons.sampling)
    kernels = [parse_recipe(recipes.of(kind)) for kind in kinds]
    mean, std = (torch.tensor(values).view(3, 1) for values in load_recipe(directory).pixel_affine(directory))
    made = [[_patches(kernel, medium) for kernel, medium in zip(kernels, sample.media)] for sample in samples]
    raw = torch.from_numpy(np.stack([np.concatenate([patches for patches, _ in one]) for one in made])).float() / 255
    metas = [meta for _, meta in made[0]]
    grids = [tuple(meta["grid_thw"]) for meta in metas]
    tokens = MediaTokens(image=model.config.image_token_id, video=model.config.video_token_id)
    sizes = [MediumSize(kind=kind, num_tokens=meta["num_tokens"]) for kind, meta in zip(kinds, metas)]
    prompt = np.array(PromptTemplate(tokenizer, tokens).token_ids(lessons.conversation, sizes))
    layout = qwen_token_layout(model.config, tokens_per_second=model.config.vision_config.tokens_per_second)
    slots = np.flatnonzero(np.isin(prompt, layout.visual_token_ids))
    spans = media_spans(prompt, slots, grids, [meta.get("second_per_grid_t", 1.0) for meta in metas], layout)
    answers = tokenizer.convert_tokens_to_ids([sample.answer for sample in samples])
    return Batch(
        prompt_ids=torch.from_numpy(prompt),
        positions=torch.from_numpy(mrope_positions(len(prompt) + 1, spans))[:, None],
        patches=((raw.unflatten(2, (3, -1)) - mean) / std).flatten(2),
        grid_thw=torch.tensor(grids),
        answer_ids=torch.tensor(answers),
        is_video="video" in kinds,
    )


@torch.no_grad()
def measure_accuracy(model: PreTrainedModel, batch: Batch, end_id: int) -> float:
    """Return the share of samples that the model answers, greedily, with the right answer and nothing behind it."""
    first = _logits(model, batch, torch.arange(len(batch.answer_ids)), None)[:, 0].argmax(dim=-1)
    second = _logits(model, batch, torch.arange(len(batch.answer_ids)), first)[:, 1].argmax(dim=-1)
    return ((first == batch.answer_ids) & (second == end_id)).float().mean().item()


def _train(
    model: PreTrainedModel,
    tokenizer: Any,
    lessons: Lessons,
    train: Batch,
    held_out: Batch,
    *,
    seed: int,
    on_step: Callable[[int, float], None],
) -> Warmup:
    any_ids = torch.tensor(tokenizer.convert_tokens_to_ids(list(lessons.answers)))
    end_id = tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    accuracy, step = 0.0, 0
    for step in range(1, lessons.max_steps + 1):
        is_form = step <= lessons.num_form_steps
        optimizer.param_groups[0]["lr"] = (FORM_LR if is_form else lessons.answer_lr) * min(1.0, step / 5)
        chosen = torch.randint(len(train.answer_ids), (BATCH_SIZE,), generator=generator)
        loss = _loss(model, train, chosen, any_ids, end_id, smoothing=1.0 if is_form else lessons.label_smoothing)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not is_form and step % STEPS_PER_CHECK == 0:
            accuracy = measure_accuracy(model, held_out, end_id)
        on_step(step, accuracy)
        if accuracy >= lessons.target:
            break
    low, high = lessons.accuracy_range
    if low <= accuracy <= high:
        return Warmup(num_steps=step, accuracy=accuracy)
    raise WarmupError(
        f"held-out accuracy is {accuracy:.3f} after {step} warm-up steps; wanted {low} to {high}: try another --seed, "
        f"or change ANSWER_LR and LABEL_SMOOTHING in {lessons.module}"
    )


def _loss(
    model: PreTrainedModel,
    batch: Batch,
    chosen: torch.Tensor,
    any_ids: torch.Tensor,
    end_id: int,
    *,
    smoothing: float,
) -> torch.Tensor:
    """Return the cross-entropy of the answer, smoothed over all answers, and of the <|im_end|> behind it."""
    answers = batch.answer_ids[chosen]
    logprobs = functional.log_softmax(_logits(model, batch, chosen, answers), dim=-1)
    right = -logprobs[:, 0].gather(1, answers[:, None]).mean()
    any_answer = -logprobs[:, 0, any_ids].mean()
    end = -logprobs[:, 1, end_id].mean()
    return ((1 - smoothing) * right + smoothing * any_answer + end) / 2


def _logits(model: PreTrainedModel, batch: Batch, chosen: torch.Tensor, response: torch.Tensor | None) -> torch.Tensor:
    """Return [B, R, V] logits at the prompt's last token and, if there is a response, at its one token."""
    ids = batch.prompt_ids.expand(len(chosen), -1)
    if response is not None:
        ids = torch.cat([ids, response[:, None]], dim=1)
    patches, grids = batch.patches[chosen].flatten(0, 1), batch.grid_thw.repeat(len(chosen), 1)
    media = (
        {"pixel_values_videos": patches, "video_grid_thw": grids}
        if batch.is_video
        else {"pixel_values": patches, "image_grid_thw": grids}
    )
    logits: torch.Tensor = model(
        input_ids=ids,
        position_ids=batch.positions[:, :, : ids.shape[1]].expand(-1, len(chosen), -1),
        **media,
        use_cache=False,
        logits_to_keep=1 if response is None else 2,
    ).logits
    return logits


def _patches(kernel: Any, medium: Image.Image | Video) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the patches, uint8 [N, D], and the meta that the data plane gives with them."""
    plan = kernel.plan(medium)
    out = np.empty(math.prod(plan.shape), np.uint8)
    plan.write(out)
    return out.reshape(plan.shape), dict(plan.meta)
