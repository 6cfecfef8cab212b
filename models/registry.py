"""The table of model families by the `model_type` of their Hugging Face config. No torch until a family is loaded."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.family import Family

FAMILIES = {
    "internvl": "models.internvl",
    "qwen2_5_vl": "models.qwen2_5_vl",
    "qwen3_vl": "models.qwen3_vl",
    "qwen3_vl_moe": "models.qwen3_vl_moe",
}
"""From model_type to the package of the family, with the modules `recipe` (torch-free), `model`, `config`, `mapping`
and `tower`."""


def read_config(model_dir: Path) -> dict[str, Any]:
    """Return the config.json of a Hugging Face folder. Raises ValueError for a model of an unknown family."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"no config.json in {model_dir}; model.path must name a Hugging Face model folder")
    config: dict[str, Any] = json.loads(path.read_text())
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{path} is of model_type {family!r}; this version trains {', '.join(sorted(FAMILIES))}, so choose "
            "a model folder of that type"
        )
    return config


def load_family(model_dir: Path) -> Family:
    """Return the family of a Hugging Face folder's model."""
    family: Family = importlib.import_module(f"{_package(model_dir)}.model").FAMILY
    return family


def load_recipe(model_dir: Path) -> Any:
    """Return the family's recipe module, with `patch_recipe`, `pixel_affine` and `IMAGE_MARKS`; torch-free."""
    return importlib.import_module(f"{_package(model_dir)}.recipe")


def _package(model_dir: Path) -> str:
    return FAMILIES[read_config(model_dir)["model_type"]]
