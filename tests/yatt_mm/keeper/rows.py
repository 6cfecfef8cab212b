"""Rows of kept rollouts for tests."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int, side: int = 96) -> bytes:
    """Return a JPEG of noise, which cannot be compressed much."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)).save(file, "JPEG")
    return file.getvalue()


def row(position: int, place: int, *, split: str = "train", reward: float = 0.5, **more: Any) -> dict[str, Any]:
    """Return a row of a response with a picture. `more`: columns that differ from the usual."""
    return {
        "step": 1,
        "split": split,
        "position": position,
        "epoch": 0,
        "set": "train",
        "index": 10 + position,
        "place": place,
        "question": f"question {position}",
        "conversation": "[]",
        "answer": "7",
        "response": f"response {position}/{place}",
        "reward": reward,
        "advantage": reward - 0.5 if split == "train" else None,
        "scores": [{"source": "reward.function", "score": reward, "words": None}],
        "parts": [],
        "read_answer": None,
        "finish_reason": "stop",
        "num_tokens": 2,
        "token_ids": [place, position],
        "logprob_mean": -0.25,
        "logprob_min": -0.5,
        "policy_version_min": 0,
        "policy_version_max": 0,
        "media": [{"kind": "image", "source": f"{position:032x}", "thumbnail": picture(position)}],
        **more,
    }
