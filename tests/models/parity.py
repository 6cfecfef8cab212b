"""Compares one model in one layout with Hugging Face transformers on the same samples, and measures the differences.

The reference takes one sample at a time, in fp32, with pixel values from the family's processor.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from models.compat.megatron_core import parallel_state
from models.layout.parallel import Parallel
from tests.models.positions import behind_videos
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.tiny import FORMS, IMAGE_TOKEN, MEAN, STD, VIDEO_TOKEN, Form, make_samples
from yatt_mm.training.train_sample import TrainSample

LEAST_GRADIENT = 5e-6
"""The gradient below which only rounding is left: a key's bias without RoPE changes nothing. All other gradients are
more than three times as large."""
OBSERVED: dict[tuple[str, str], Differences] = {}
"""The differences that the suite measured, by (model, layout), for the table at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The results of transformers for the samples."""

    logprobs: list[np.ndarray]
    """The log-probabilities of each sample's scored tokens."""
    entropies: list[np.ndarray]
    gradients: dict[str, np.ndarray]
    """The gradients, by the name of the tensor in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """The largest difference of each kind over all samples, tokens and tensors."""

    logprob: float
    entropy: float
    gradient: float
    """The largest difference in a tensor, relative to the largest entry of that tensor."""
    num_changed_weights: int
    """The number of tensors whose export is not bit-identical to the checkpoint."""
    num_scored: int
    """The number of samples that this rank scored, and of all ranks the largest one."""

    @classmethod
    def worst(cls, parts: list[Differences]) -> Differences:
        """Return the largest of each kind over ranks."""
        return cls(**{field.name: max(asdict(part)[field.name] for part in parts) for field in fields(cls)})


def write_reference(folder: Path) -> Path:
    """Compute the reference of a model folder, which `compare` reads. Return the folder."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    logprobs, entropies, loss = [], [], torch.zeros(())
    form = FORMS[model.config.model_type]
    for sample in make_samples(form):
        inputs = model_inputs(sample, form)
        logits = model(**inputs, **positions_of(model, inputs)).logits
        distribution = logits[0, :-1].log_softmax(-1)
        labels = torch.from_numpy(sample.token_ids[1:])
        mask = torch.from_numpy(sample.loss_mask[1:])
        scored = distribution.gather(1, labels[:, None])[:, 0][mask]
        entropy = -(distribution.exp() * distribution).sum(-1)[mask]
        assert sample.sampled is not None
        loss = loss + jobs.weighted_sum(scored, entropy, torch.from_numpy(sample.sampled.weights))
        logprobs.append(scored.detach().numpy())
        entropies.append(entropy.detach().numpy())
    loss.backward()
    names = load_file(folder / "model.safetensors").keys()
    gradients = {saved_name(name, names): _saved_grad(name, param) for name, param in model.named_parameters()}
    reference = Reference(logprobs=logprobs, entropies=entropies, gradients=gradients)
    (folder / "reference.pickle").write_bytes(pickle.dumps(reference))
    return folder


def model_inputs(sample: TrainSample, form: Form) -> dict[str, torch.Tensor]:
    """Return the inputs of the Hugging Face model for one sample: images and videos separately, each in the order of
    the tokens."""
    tokens = torch.from_numpy(sample.token_ids)[None]
    if form == "tiles":
        tiles = {"pixel_values": _pixels(sample.patches)} if sample.patches else {}
        return {"input_ids": tokens, **tiles}
    inputs = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE_TOKEN).int() + 2 * (tokens == VIDEO_TOKEN)}
    seen = tokens[0][(tokens[0] == IMAGE_TOKEN) | (tokens[0] == VIDEO_TOKEN)].tolist()
    media: dict[int, list[int]] = {IMAGE_TOKEN: [], VIDEO_TOKEN: []}
    for number, (t, h, w) in enumerate(sample.grid_thw):
        media[seen[0]].append(number)
        del seen[: t * h * w // 4]
    for token, names in NAMES.items():
        if media[token]:
            inputs[names[0]] = _pixels([sample.patches[number] for number in media[token]])
            inputs[names[1]] = torch.tensor([sample.grid_thw[number] for number in media[token]])
    if media[VIDEO_TOKEN] and form == "spans":
        inputs["second_per_grid_ts"] = torch.tensor([sample.seconds_per_grid[number] for number in media[VIDEO_TOKEN]])
    return inputs


def positions_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return [3, 1, T] the positions that a model with M-RoPE would compute from the inputs, except behind a video (see
    `positions.py`)."""
    if "mm_token_type_ids" not in inputs:
        return {}
    wanted = {name: value for name, value in inputs.items() if not name.startswith("pixel_values")}
    positions, _ = model.model.get_rope_index(**wanted)
    return {"position_ids": behind_videos(positions[:, 0], inputs["mm_token_type_ids"][0])[:, None]}


NAMES = {IMAGE_TOKEN: ("pixel_values", "image_grid_thw"), VIDEO_TOKEN: ("pixel_values_videos", "video_grid_thw")}
"""The names that transformers gives to the pixels and grids of images and videos."""


def _pixels(patches: Sequence[np.ndarray]) -> torch.Tensor:
    raw = np.concatenate(patches)
    by_channel = raw.reshape(len(raw), 3, -1)
    mean, std = (np.array(values)[:, None] for values in (MEAN, STD))
    return torch.from_numpy(((by_channel / 255 - mean) / std).reshape(raw.shape).astype(np.float32))


def compare(rank: int, folder: Path, parallel: Parallel) -> Differences:
    """Run the layout once and compare everything that this rank has with the reference. This is the job of one rank."""
    reference: Reference = pickle.loads((folder / "reference.pickle").read_bytes())
    engine = jobs.build_engine(folder, parallel)
    original = load_file(folder / "model.safetensors")
    weights = jobs.exported(engine)
    assert weights.keys() == original.keys()
    changed = [name for name in original if not np.array_equal(weights[name], original[name].numpy())]
    scored = jobs.score(engine)
    gradients = jobs.gradients(engine)
    assert gradients.keys() == reference.gradients.keys()
    mine = jobs.GROUPS[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    places = [sample for group in mine for sample in group] if scored or engine.is_loss_rank else []
    assert len(scored) == len(places)
    return Differences(
        logprob=_worst([(logprobs, reference.logprobs[i]) for i, (logprobs, _) in zip(places, scored)]),
        entropy=_worst([(entropies, reference.entropies[i]) for i, (_, entropies) in zip(places, scored)]),
        gradient=max(
            _worst([(gradients[name], wanted)]) / max(float(np.abs(wanted).max()), LEAST_GRADIENT)
            for name, wanted in reference.gradients.items()
        ),
        num_changed_weights=len(changed),
        num_scored=len(scored),
    )


def table() -> str:
    """Return the measured differences as a table for the documentation."""
    rows = ["| model | layout | log-probability | entropy | gradient | export |", "|---|---|---|---|---|---|"]
    for (model, layout), seen in OBSERVED.items():
        export = "bit-identical" if not seen.num_changed_weights else f"{seen.num_changed_weights} tensors differ"
        rows.append(
            f"| {model} | {layout} | {seen.logprob:.1e} | {seen.entropy:.1e} | {seen.gradient:.1e} | {export} |"
        )
    return "\n".join(rows)


def _worst(pairs: list[tuple[np.ndarray, np.ndarray]]) -> float:
    for found, wanted in pairs:
        assert found.shape == wanted.shape
        assert np.isfinite(found).all()
    return max((float(np.abs(found - wanted).max()) for found, wanted in pairs), default=0.0)


def _saved_grad(name: str, param: torch.nn.Parameter) -> np.ndarray:
    """Return the gradient in the form of the checkpoint, where experts are [num_experts, in, out]."""
    assert param.grad is not None
    return (param.grad.transpose(1, 2) if ".experts." in name else param.grad).numpy()


def saved_name(name: str, saved: object) -> str:
    """Return a parameter's name in a checkpoint. Some checkpoints have the prefixes of older releases."""
    assert isinstance(saved, type({}.keys()))
    old = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    around = name.replace("model.language_model.", "language_model.model.")
    forms = (name, old, around, name.removeprefix("model."), f"language_model.{name}")
    return next(form for form in forms if form in saved)
