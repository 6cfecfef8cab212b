"""The folder of an adapter in the form of PEFT, which `peft.PeftModel.from_pretrained` loads onto the base model.

PEFT names a matrix after its layer in transformers' model, behind `base_model.model.`. Released checkpoints may have
older names for the same layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from models.lora.adapters import Adapters
from models.lora.settings import LoraSettings

FOLDER = "adapter"
"""The name of the folder inside that of the merged model."""
PREFIX = "base_model.model."
OLDER = {
    "language_model.model.": "model.language_model.",
    "model.layers.": "model.language_model.layers.",
    "visual.": "model.visual.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
"""By how names begin in older checkpoints, how they begin in transformers' model."""


def peft_writer(adapters: Adapters | None, base: Path, tick: Callable[[], None]) -> Callable[[Path], None]:
    """Gather the adapters of a model, and return what writes them, on rank 0, into a folder inside that of the merged
    model: nothing without adapters. All ranks must call this together; `tick` is called for each matrix.

    `base`: the folder of the model that they belong to.
    """
    if adapters is None:
        return lambda folder: None
    settings, layers = adapters.settings, adapters.layers if dist.get_rank() == 0 else frozenset[str]()
    tensors = _peft_tensors(adapters.weights, layers, tick)
    return lambda folder: _write(folder / FOLDER, tensors, settings, base)


def _peft_tensors(
    matrices: Iterable[tuple[str, torch.Tensor]], layers: Collection[str], tick: Callable[[], None]
) -> dict[str, torch.Tensor]:
    """Return by PEFT's names the matrices A [r, in] and B [out, r] of those `layers`, as copies in host memory. Names
    of matrices are those of `Adapters.weights`, names of layers those of the checkpoint."""
    found = {}
    for name, matrix in matrices:
        layer, _, of_layer = name.rpartition(".lora_")
        if layer in layers:
            found[f"{PREFIX}{_in_transformers(layer)}.lora_{of_layer}"] = matrix.detach().to("cpu", copy=True)
        tick()
    return found


def _write(folder: Path, tensors: Mapping[str, torch.Tensor], settings: LoraSettings, base: Path) -> None:
    layers = sorted({name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors})
    alpha = settings.alpha
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "target_modules": layers,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
        "task_type": None,
    }
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _in_transformers(layer: str) -> str:
    """Return what transformers' model calls a layer of a checkpoint."""
    for older, present in OLDER.items():
        if layer.startswith(older):
            return present + layer.removeprefix(older)
    return layer
