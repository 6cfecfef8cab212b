"""Checks before anything heavy starts: keys that must fit each other, model folder, layout, media, shards, judges,
reward function."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from dataplane.core.errors import DatasetError
from dataplane.datasets.roots import WANTED, find_dataset_files
from models.layout.parallel import check_engine_layout, check_layout
from models.recipes.media_recipes import load_recipes
from yatt_mm.common.chat_template import CHAT_TEMPLATE, read_chat_template
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.data_section import FieldsSection
from yatt_mm.config.eval_section import held_out_key_of
from yatt_mm.config.judge_section import judge_spec, remote_spec
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompt_check import prompt_template_of
from yatt_mm.preflight.host_checks import check_hosts
from yatt_mm.preflight.model_folders import check_critic, check_model_folder, check_reference
from yatt_mm.preflight.placement_checks import check_placement
from yatt_mm.preflight.run_folder import check_run_folder
from yatt_mm.preflight.run_sets import held_out_sections, key_of
from yatt_mm.protocol.verdicts import YesNo
from yatt_mm.rewards.loading import load_reward_function
from yatt_mm.rollout.folder_tokenizer import TOKENIZER, FolderTokenizer

TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")


def check_run(config: Config) -> None:
    """Run all checks of this module, in the order in which a user would want to see the errors.

    Raises:
        ConfigError: with what was found, what was wanted, and what to change.
    """
    hf_config = check_model(config)
    check_tokenizer("model.path", config.model.path)
    if config.trains:
        check_reference(config, hf_config)
        check_critic(config, hf_config)
        check_run_folder(config)
    check_media(config, "model.path", config.model.path)
    check_sets(config)
    if not held_out_sections(config):
        raise ConfigError("data.eval is missing, and eval.sets has no set; add one of them to the config")
    _check_rewards(config)
    check_judges(config)
    check_placement(config)
    check_hosts(config)
    check_words(config)
    rollout, train = config.rollout, config.train
    if rollout.max_tokens >= rollout.max_model_len:
        raise ConfigError(
            f"rollout.max_tokens is {rollout.max_tokens} and rollout.max_model_len {rollout.max_model_len}; the "
            "second holds prompt and response, so make it larger"
        )
    if not config.trains:
        return
    if config.algorithm.overlong_buffer > rollout.max_tokens:
        raise ConfigError(
            f"algorithm.overlong_buffer is {config.algorithm.overlong_buffer} and rollout.max_tokens "
            f"{rollout.max_tokens}; the first is the end of the second, so make it smaller"
        )
    if train.max_tokens_per_microbatch < rollout.max_model_len:
        raise ConfigError(
            f"train.max_tokens_per_microbatch is {train.max_tokens_per_microbatch}, less than "
            f"rollout.max_model_len ({rollout.max_model_len}); the longest sample must fit into a microbatch"
        )
    if config.train.prompts_per_step < config.controllers.num:
        raise ConfigError(
            f"train.prompts_per_step is {config.train.prompts_per_step}, fewer than the "
            f"{config.controllers.num} controllers (controllers.num); every controller needs a prompt"
        )
    if config.train.num_minibatches > config.train.prompts_per_step:
        raise ConfigError(
            f"train.num_minibatches is {config.train.num_minibatches}, more than train.prompts_per_step "
            f"({config.train.prompts_per_step}); a minibatch needs at least one prompt"
        )


def check_data(config: Config) -> None:
    """Check what is needed to make prompts of the data sets: the model's folder without its weights, the files, and the
    reward functions.

    Raises:
        ConfigError: something is missing, or they do not fit.
    """
    check_model_folder("model.path", config.model.path, has_weights=False)
    check_tokenizer("model.path", config.model.path)
    check_media(config, "model.path", config.model.path)
    check_sets(config)
    _check_rewards(config)


def _check_rewards(config: Config) -> None:
    paths = {"reward.function": config.reward.function}
    paths |= {f"{key_of(one)}.reward": one.reward for one in config.data.train}
    paths |= {f"eval.sets.{name}.reward": one.reward for name, one in config.eval.sets.items()}
    for key, path in paths.items():
        try:
            if path is not None:
                load_reward_function(path)
        except ConfigError as error:
            raise ConfigError(f"{key} is {error}") from error


def check_sets(config: Config) -> None:
    """Check the files of the data sets, and what `data.filter` needs.

    Raises:
        ConfigError: a file cannot be read, nothing matches, or a key has no effect.
    """
    if config.data.filter.max_prompt_tokens is not None and prompt_template_of(config) is None:
        raise ConfigError(
            f"data.filter.max_prompt_tokens counts tokens before an engine does, which needs {TOKENIZER} in model.path "
            f"({config.model.path}); write it with transformers (AutoTokenizer, save_pretrained), or leave the key out"
        )
    if config.dataplane.uri is None:
        for one in config.data.train:
            check_shards(key_of(one), one.path)
        for name, held_out in held_out_sections(config).items():
            check_shards(held_out_key_of(name), held_out.path)
        return
    for key, fields in _fields_of(config):
        if fields.media:
            raise ConfigError(
                f"{key}: fields.media is {', '.join(fields.media)}, but the node of dataplane.uri reads the set; "
                f"name them in its root, #media={','.join(fields.media)}"
            )


def _fields_of(config: Config) -> list[tuple[str, FieldsSection]]:
    """Return (key, field names) of every data set."""
    return [
        *((key_of(one), one.fields) for one in config.data.train),
        *((held_out_key_of(name), one.fields) for name, one in held_out_sections(config).items()),
    ]


def check_model(config: Config) -> dict[str, Any]:
    """Return the model's config.json, after checking that the model can be trained in this layout and to this length.

    Raises:
        ConfigError: no such folder, an unknown family, an impossible layout, or more tokens than the model's positions.
    """
    hf_config = check_model_folder("model.path", config.model.path)
    _check_positions("rollout", config.rollout.max_model_len, hf_config)
    try:
        check_layout(config.parallel(), hf_config)
    except ValueError as error:
        raise ConfigError(f"train.parallel: {error}") from error
    _check_engine("rollout.tp", config.rollout.tp, hf_config)
    return hf_config


def check_tokenizer(key: str, path: str) -> None:
    """Check that a model's folder has a tokenizer and a chat template.

    Raises:
        ConfigError: one of them is missing.
    """
    folder = Path(path)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(
            f"{key} {folder} has no tokenizer ({' or '.join(TOKENIZERS)}); copy those of the model from which its "
            "weights come"
        )
    if read_chat_template(folder) is None:
        raise ConfigError(
            f"{key} {folder} has no chat template for its tokenizer ({CHAT_TEMPLATE}, or chat_template in "
            "tokenizer_config.json; tokenizers do not read chat_template.json); copy that of the model from which its "
            "weights come"
        )


def check_media(config: Config, key: str, path: str) -> None:
    """Check that a model's folder and `data.video` agree about videos.

    Raises:
        ConfigError: they contradict each other.
    """
    try:
        load_recipes(Path(path), config.data.video.sampling())
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError(f"{key}: {error}") from error


def check_judges(config: Config) -> None:
    """Check the judges' folders, templates, patterns and labels.

    Raises:
        ConfigError: one of them cannot be used.
    """
    judges = config.reward.judges
    for name, section in judges.items():
        if section.url is not None and section.tp > 1:
            raise ConfigError(
                f"reward.judges.{name}.tp is {section.tp}, but its url names a server, which cuts its model itself; "
                f"leave reward.judges.{name}.tp out"
            )
        if section.url is None:
            hf_config = check_model_folder(f"reward.judges.{name}.model", section.model)
            check_tokenizer(f"reward.judges.{name}.model", section.model)
            _check_engine(f"reward.judges.{name}.tp", section.tp, hf_config)
            _check_positions(f"reward.judges.{name}", section.max_model_len, hf_config)
            check_media(config, f"reward.judges.{name}.model", section.model)
        remote_spec(name, section, controllers_deadline_s=config.controllers.deadline_s)
        spec = judge_spec(name, section, config.data.video.sampling())
        if section.url is None and spec.num_sampled >= section.max_model_len:
            raise ConfigError(
                f"reward.judges.{name}.max_tokens is {spec.num_sampled} and reward.judges.{name}.max_model_len "
                f"{section.max_model_len}; the second holds what the judge reads and its answer, so make it larger"
            )
    if not judges and not config.reward.weight:
        raise ConfigError("reward.weight is 0 and reward.judges is empty, so nothing gives a reward; add a judge")


def check_words(config: Config) -> None:
    """Check that the tokenizers of judges have the words of their verdicts, where a tokenizer can be read quickly.

    Raises:
        ConfigError: a judge could say neither yes nor no.
    """
    for name, section in config.reward.judges.items():
        if section.url is not None or section.verdict != "yes_no" or not (Path(section.model) / TOKENIZER).is_file():
            continue
        verdict = judge_spec(name, section, config.data.video.sampling()).verdict
        assert isinstance(verdict, YesNo)
        try:
            verdict.token_ids(FolderTokenizer(Path(section.model)).encode)
        except ValueError as error:
            raise ConfigError(f"reward.judges.{name}: {error}") from error


def _check_positions(section: str, max_model_len: int, hf_config: dict[str, Any]) -> None:
    num_positions = {**hf_config, **hf_config.get("text_config", {})}.get("max_position_embeddings", max_model_len)
    if max_model_len > num_positions:
        raise ConfigError(
            f"{section}.max_model_len is {max_model_len} and the model has {num_positions} positions "
            f"(max_position_embeddings in its config.json); lower {section}.max_model_len"
        )


def _check_engine(key: str, tp: int, hf_config: dict[str, Any]) -> None:
    try:
        check_engine_layout(key, tp, hf_config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_shards(key: str, pattern: str) -> None:
    """Check that the pattern matches files of one known format, and that every tar begins like a tar. The node checks
    the other formats.

    Raises:
        ConfigError: nothing matches, or a file cannot be read.
    """
    try:
        found = find_dataset_files(key, [pattern])
    except DatasetError as error:
        if "no file matches" not in str(error):
            raise ConfigError(f"{key}: {error}") from error
        raise ConfigError(
            f"{key} is {pattern!r}: no file matches (relative to {Path.cwd()}); wanted {WANTED} "
            "(for the digits example: python -m examples.digits.prepare)"
        ) from error
    for item in found:
        if item.format == "tar" and item.file.is_local:
            _check_tar(key, item.file.path)


def _check_tar(key: str, shard: str) -> None:
    try:
        with tarfile.open(shard, "r:") as tar:
            first = tar.next()
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{key}: cannot read the shard {shard}: {error}; wanted an uncompressed .tar") from error
    if first is None:
        raise ConfigError(f"{key}: the shard {shard} is empty; remove it or write samples into it")
