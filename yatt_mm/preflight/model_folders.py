"""Checks of the folders of models: what every one must have, and that a reference and a critic have the policy's
architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.registry import FAMILIES
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config

OF_MODEL = ("model_type", "image_token_id", "video_token_id", "tie_word_embeddings", "downsample_ratio")
OF_TEXT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "mrope_section",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
OF_VISION = (
    "depth",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_attention_heads",
    "out_hidden_size",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "window_size",
    "fullatt_block_indexes",
    "deepstack_visual_indexes",
    "image_size",
)
"""The keys of config.json that describe weights, and what is computed with them. A key that one of two configs does not
have is not compared: files of different versions of transformers say different defaults."""


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
                f"reference.{key} is {value}, and nothing reads it; set algorithm.kl.where to loss or reward, or leave "
                "it out"
            )
        return
    if given is None:
        return
    _check_architecture("reference", given, hf_config)


def check_critic(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Check that the model from which a critic begins has the architecture of the policy, whose config.json is given.

    Raises:
        ConfigError: it cannot be read, it has another one, or the algorithm has no critic.
    """
    if config.critic_path is None:
        for key, value in config.critic.model_dump(exclude_defaults=True).items():
            raise ConfigError(
                f"critic.{key} is {value}, and nothing reads it: the advantages of {config.algorithm.name} compare "
                "responses with each other, without a critic; set algorithm.name to ppo, or leave it out"
            )
    elif config.critic.path is not None:
        _check_architecture("critic", config.critic.path, hf_config)


def _check_architecture(section: str, given: str, hf_config: Mapping[str, Any]) -> None:
    policy, other = _architecture(hf_config), _architecture(check_model_folder(f"{section}.path", given))
    for key in policy:
        if key in other and policy[key] != other[key]:
            raise ConfigError(
                f"{section}.path is {given}, whose config.json has {key} {other[key]}, where that of model.path "
                f"has {policy[key]}; a {section} needs the architecture of the policy, such as the model from which it "
                "was trained"
            )


def _architecture(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return by dotted key what a config.json says of the architecture, wherever its version of transformers says it:
    with the text's settings at the top or in a section of their own, and those of RoPE likewise."""
    text = {**hf_config, **hf_config.get("text_config", {})}
    for rope in ("rope_scaling", "rope_parameters"):
        text |= text.get(rope) or {}
    vision = hf_config.get("vision_config", {})
    found = {name: hf_config[name] for name in OF_MODEL if name in hf_config}
    found |= {f"text_config.{name}": text[name] for name in OF_TEXT if name in text}
    return found | {f"vision_config.{name}": vision[name] for name in OF_VISION if name in vision}
