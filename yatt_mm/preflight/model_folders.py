"""Checks of the folders of models: what every one must have, and that a reference has the policy's architecture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models.registry import FAMILIES
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config

NOT_OF_WEIGHTS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""The keys of a config.json in which two models of one architecture may differ."""


def check_model_folder(key: str, path: str, *, has_weights: bool = True) -> dict[str, Any]:
    """Return the config.json of a model folder of a known family. `has_weights`: whether it must have weights.

    Raises:
        ConfigError: there is no such folder, something is missing in it, or its family is not known.
    """
    folder = Path(path)
    file = folder / "config.json"
    if not file.is_file():
        found = "no such folder" if not folder.is_dir() else f"a folder with {sorted(p.name for p in folder.iterdir())}"
        where = "" if folder.is_absolute() else f" ({folder.absolute()})"
        raise ConfigError(
            f"{key} is {path}{where}: {found}; wanted a Hugging Face folder with config.json "
            "(the examples' are made by python -m examples.digits.prepare and examples.judge.prepare)"
        )
    try:
        hf_config = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{key}: {file} cannot be read ({error}); wanted the JSON of a Hugging Face model") from error
    if not isinstance(hf_config, dict):
        raise ConfigError(f"{key}: {file} holds a {type(hf_config).__name__}; wanted the JSON object of a model")
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"{key} is a {model_type!r} model; known families: {', '.join(sorted(FAMILIES))}")
    if has_weights and not list(folder.glob("*.safetensors")):
        raise ConfigError(f"{key} {folder} has no .safetensors file; convert the weights to safetensors")
    return hf_config


def check_reference(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the reference model, if there is one, has the architecture of the policy, whose config.json is given.

    Raises:
        ConfigError: it cannot be read, it has another one, or nothing reads it.
    """
    given = config.reference.path
    if config.references is None:
        for key, value in config.reference.model_dump(exclude_defaults=True).items():
            raise ConfigError(
                f"reference.{key} is {value}, and nothing reads it; set algorithm.kl.where to loss, or leave it out"
            )
        return
    if given is None:
        return
    for key, of_policy, of_reference in _differences(hf_config, check_model_folder("reference.path", given)):
        raise ConfigError(
            f"reference.path is {given}, whose config.json has {key} {of_reference}, where that of model.path has "
            f"{of_policy}; a reference needs the architecture of the policy, such as the model from which it was "
            "trained"
        )


def _differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value of one, value of the other) where two configs describe different weights."""
    for key in sorted((one.keys() | other.keys()) - NOT_OF_WEIGHTS):
        values = one.get(key), other.get(key)
        if isinstance(values[0], Mapping) and isinstance(values[1], Mapping):
            yield from _differences(values[0], values[1], f"{prefix}{key}.")
        elif values[0] != values[1]:
            yield f"{prefix}{key}", *values
