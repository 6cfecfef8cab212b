"""What an update was computed from, on disk, where its loss or gradient was not finite and the update was skipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from yatt_mm.common.writing import writing
from yatt_mm.training.train_sample import TrainSample


def write_update(
    path: Path,
    minibatch: Sequence[Sequence[TrainSample]],
    logprobs: Sequence[Sequence[np.ndarray]],
    loss_metrics: dict[str, float],
) -> None:
    """Write what one rank has of an update as an `.npz` file, which `numpy.load` reads. Raises DiskError.

    `<microbatch>/<sample>/...` are the sample's tokens and what the loss needs of them, with `logprobs` under the
    weights before the update where the rank has them. `media/<digest>` are the patches that this rank encodes.
    """
    arrays: dict[str, Any] = {f"loss_metrics/{name}": np.float64(value) for name, value in loss_metrics.items()}
    for number, micro in enumerate(minibatch):
        for place, sample in enumerate(micro):
            tokens, prefix = sample.sampled, f"{number}/{place}"
            assert tokens is not None
            arrays |= {
                f"{prefix}/token_ids": sample.token_ids,
                f"{prefix}/loss_mask": sample.loss_mask,
                f"{prefix}/grid_thw": np.array(sample.grid_thw, dtype=np.int64),
                f"{prefix}/media": np.array(sample.media_keys, dtype=np.str_),
                f"{prefix}/advantages": tokens.advantages,
                f"{prefix}/weights": tokens.weights,
                f"{prefix}/rollout_logprobs": tokens.rollout_logprobs,
                f"{prefix}/old_logprobs": tokens.old_logprobs,
                f"{prefix}/is_stale": tokens.is_stale,
            }
            for name, values in (
                ("reference_logprobs", tokens.reference_logprobs),
                ("old_values", tokens.old_values),
                ("returns", tokens.returns),
            ):
                if values is not None:
                    arrays[f"{prefix}/{name}"] = values
            if number < len(logprobs):
                arrays[f"{prefix}/logprobs"] = logprobs[number][place]
            for key, patches in zip(sample.media_keys, sample.patches):
                if patches is not None:
                    arrays[f"media/{key}"] = patches
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **arrays)
