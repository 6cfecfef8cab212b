"""The labels of a sequence classifier, from its Hugging Face folder: config.json and the head's shape.

Reads names and shapes alone, no weights. Imported in controllers: no torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from models.weights.safetensors_header import read_header

HEAD = "score.weight"
"""The name that transformers gives the head of a `...ForSequenceClassification`: a matrix [labels, hidden]."""
MAX_NAMES = 5
"""The number of other tensors that an error lists."""
BODY = ("model.", "visual.", "language_model.", "vision_tower.", "multi_modal_projector.", "lm_head.")


def read_labels(model_dir: Path) -> tuple[str, ...]:
    """Return the names of a classifier's labels, by row of its head.

    Raises: ValueError: the folder has no linear head of a classifier, or its config.json says another number of labels.
    """
    shapes = _shapes(model_dir)
    if HEAD not in shapes:
        others = [name for name in shapes if not name.startswith(BODY)][:MAX_NAMES]
        raise ValueError(
            f"model {model_dir} has no tensor {HEAD}, the linear head [labels, hidden] of a sequence classifier "
            f"(beside the model it has {', '.join(others) or 'nothing'}); choose a reward model saved with one, or a "
            "verdict that the model says (yes_no, regex, json)"
        )
    num = shapes[HEAD][0]
    config: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    names: dict[str, str] = config.get("id2label") or {}
    declared = len(names) or config.get("num_labels", num)
    if declared != num:
        raise ValueError(
            f"model {model_dir} has a head of {num} rows ({HEAD}) and {declared} labels in its config.json (id2label, "
            "num_labels); make them equal"
        )
    return tuple(names.get(str(row), f"LABEL_{row}") for row in range(num))


def _shapes(model_dir: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in the folder's safetensors files."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        header: dict[str, Any] = json.loads(read_header(path))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes
