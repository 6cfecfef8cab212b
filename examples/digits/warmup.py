"""A few seconds of supervised steps, so that reinforcement learning can start and still has much to learn.

There are two stages on a small part of the train split. The first teaches only the form: any digit, then <|im_end|>.
The second teaches the right digits, with smoothed labels, until the held-out greedy accuracy reaches `TARGET_ACCURACY`.
The form comes first because GRPO sharpens whatever responses it finds: a model that is unsure of the form would settle
on a few frequent digits. The smoothing keeps every digit likely enough to be sampled sometimes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText, PreTrainedModel, Qwen2_5_VLProcessor

from examples.digits.data import DigitSample, Split
from examples.digits.model import load_processor
from examples.preparing import Warmup, WarmupError

TARGET_ACCURACY = 0.45
ACCURACY_RANGE = (0.3, 0.6)
"""The range of held-out accuracies, 0 to 1, in which the warm-up has succeeded."""
NUM_SAMPLES = 300
"""The number of samples for the warm-up, the first of the train split. Reinforcement learning uses all of it."""
NUM_FEW = 64
"""The number of held-out samples that are asked first after a step. All are asked when the model reads at least half of
`TARGET_ACCURACY` of these."""
BATCH_SIZE = 32
NUM_FORM_STEPS = 30
MAX_STEPS = 300
FORM_LR = 1e-3
ANSWER_LR = 2e-4
NUM_LR_WARMUP_STEPS = 5
LABEL_SMOOTHING = 0.3
MAX_GRAD_NORM = 1.0
DIGITS = tuple(str(digit) for digit in range(10))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Questions of equal length, ready for the model, and their answers."""

    prompt_ids: torch.Tensor
    """[B, T] token ids, with one placeholder for each visual token."""
    token_types: torch.Tensor
    """[B, T] 1 on visual tokens, otherwise 0."""
    patches: torch.Tensor
    """[B, num_patches, C * T * P * P] normalised patches."""
    grid_thw: torch.Tensor
    """[B, 3] the grid (t, h, w) of each image, in patches."""
    answer_ids: torch.Tensor
    """[B] the token id of each right answer."""

    def select(self, indices: torch.Tensor) -> _Batch:
        """Return the samples at these indices."""
        return _Batch(
            prompt_ids=self.prompt_ids[indices],
            token_types=self.token_types[indices],
            patches=self.patches[indices],
            grid_thw=self.grid_thw[indices],
            answer_ids=self.answer_ids[indices],
        )


def warm_up(
    directory: Path, split: Split, *, seed: int = 0, on_step: Callable[[int, float], None] = lambda step, accuracy: None
) -> Warmup:
    """Train the model folder in place. `on_step` gets the number of steps done and the latest held-out accuracy,
    of all samples or of `NUM_FEW`.

    This runs on one thread, so the result depends only on the seed.

    Raises:
        WarmupError: the accuracy skips `ACCURACY_RANGE` or does not reach it; the folder is unchanged.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        processor = load_processor(directory)
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        result = _train(
            model,
            processor,
            _make_batch(processor, split.train[:NUM_SAMPLES]),
            _make_batch(processor, split.held_out),
            seed=seed,
            on_step=on_step,
        )
        model.save_pretrained(directory)
    finally:
        torch.set_num_threads(num_threads)
    return result


def _train(
    model: PreTrainedModel,
    processor: Qwen2_5_VLProcessor,
    train: _Batch,
    held_out: _Batch,
    *,
    seed: int,
    on_step: Callable[[int, float], None],
) -> Warmup:
    digit_ids = torch.tensor(processor.tokenizer.convert_tokens_to_ids(list(DIGITS)))
    end_id = processor.tokenizer.eos_token_id
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    few, accuracy = held_out.select(torch.arange(min(NUM_FEW, len(held_out.answer_ids)))), 0.0
    for step in range(MAX_STEPS):
        is_form = step < NUM_FORM_STEPS
        batch = train.select(torch.randint(len(train.answer_ids), (BATCH_SIZE,), generator=generator))
        optimizer.param_groups[0]["lr"] = (FORM_LR if is_form else ANSWER_LR) * min(1, (step + 1) / NUM_LR_WARMUP_STEPS)
        loss = _supervised_loss(model, batch, digit_ids, end_id, smoothing=1.0 if is_form else LABEL_SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if not is_form:
            accuracy = _first_token_accuracy(model, few)
            if accuracy >= TARGET_ACCURACY / 2:
                accuracy = _first_token_accuracy(model, held_out)
        on_step(step + 1, accuracy)
        if accuracy >= TARGET_ACCURACY:  # the form, once learned, stays: cheap to leave out of the check until here
            accuracy = measure_accuracy(model, held_out, end_id)
            return _checked(Warmup(num_steps=step + 1, accuracy=accuracy))
    return _checked(Warmup(num_steps=MAX_STEPS, accuracy=accuracy))


def _supervised_loss(
    model: PreTrainedModel, batch: _Batch, digit_ids: torch.Tensor, end_id: int, *, smoothing: float
) -> torch.Tensor:
    """Return the cross-entropy of the digit, smoothed over the ten digits, and of the <|im_end|> behind it."""
    logprobs_BRV = functional.log_softmax(_logits(model, batch, batch.answer_ids), dim=-1)
    right = -logprobs_BRV[:, 0].gather(1, batch.answer_ids[:, None]).mean()
    any_digit = -logprobs_BRV[:, 0, digit_ids].mean()
    end = -logprobs_BRV[:, 1, end_id].mean()
    return ((1 - smoothing) * right + smoothing * any_digit + end) / 2


@torch.no_grad()
def measure_accuracy(model: PreTrainedModel, batch: _Batch, end_id: int) -> float:
    """Return the share of questions that the model answers, greedily, with the right digit and nothing behind it."""
    first_B = _first_tokens(model, batch)
    second_B = _logits(model, batch, first_B)[:, 1].argmax(dim=-1)
    return ((first_B == batch.answer_ids) & (second_B == end_id)).float().mean().item()


def _first_token_accuracy(model: PreTrainedModel, batch: _Batch) -> float:
    return (_first_tokens(model, batch) == batch.answer_ids).float().mean().item()


@torch.no_grad()
def _first_tokens(model: PreTrainedModel, batch: _Batch) -> torch.Tensor:
    """Return [B] the token ids that the model chooses first, greedily."""
    return _logits(model, batch, None)[:, 0].argmax(dim=-1)


def _logits(model: PreTrainedModel, batch: _Batch, response_B: torch.Tensor | None) -> torch.Tensor:
    """Return [B, R, V] logits at the prompt's last token and, if there is a response, at its one token."""
    ids, types, num_logits = batch.prompt_ids, batch.token_types, 1
    if response_B is not None:
        ids = torch.cat([ids, response_B[:, None]], dim=1)
        types = functional.pad(types, (0, 1))
        num_logits = 2
    logits: torch.Tensor = model(
        input_ids=ids,
        mm_token_type_ids=types,
        pixel_values=batch.patches.flatten(0, 1),
        image_grid_thw=batch.grid_thw,
        use_cache=False,
        logits_to_keep=num_logits,
    ).logits
    return logits


def _make_batch(processor: Qwen2_5_VLProcessor, samples: Sequence[DigitSample]) -> _Batch:
    content = [{"type": "image"}, {"type": "text", "text": samples[0].question}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [Image.open(io.BytesIO(sample.png)) for sample in samples]
    inputs = processor(text=[prompt] * len(samples), images=images, return_tensors="pt")
    answers = processor.tokenizer.convert_tokens_to_ids([sample.answer for sample in samples])
    return _Batch(
        prompt_ids=inputs["input_ids"],
        token_types=inputs["mm_token_type_ids"],
        patches=inputs["pixel_values"].unflatten(0, (len(samples), -1)),
        grid_thw=inputs["image_grid_thw"],
        answer_ids=torch.tensor(answers),
    )


def _checked(warmup: Warmup) -> Warmup:
    low, high = ACCURACY_RANGE
    if low <= warmup.accuracy <= high:
        return warmup
    raise WarmupError(
        f"held-out accuracy is {warmup.accuracy:.3f} after {warmup.num_steps} warm-up steps; wanted {low} to {high}: "
        "try another --seed, or change ANSWER_LR and LABEL_SMOOTHING in examples/digits/warmup.py"
    )
