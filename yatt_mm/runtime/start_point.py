"""Where a run begins: its data sets, as the node finds them, and the state of the checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataplane.client.client import Client
from dataplane.core.errors import DatasetError
from dataplane.core.refs import Dataset
from models.recipes.media_recipes import load_recipes
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.errors import ConfigError
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompts import bad_media_error
from yatt_mm.preflight.first_samples import check_first_samples
from yatt_mm.preflight.judge_servers import unreachable_servers
from yatt_mm.preflight.overlap import files_in_both
from yatt_mm.preflight.reward_trial import failure_on_a_sample
from yatt_mm.protocol.control import RunStart


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a run begins."""

    start: RunStart
    batches: StepBatches
    train_media: str
    """Which media the first training samples have, in words."""
    eval_media: str
    warnings: tuple[str, ...]
    """What the user may not have meant."""


def find_start(config: Config, uri: str, checkpoint: Path | None, state: dict[str, Any] | None) -> StartPoint:
    """Index the data sets, look at their first samples, and return where the run begins.

    Raises:
        ConfigError: a data set cannot be used, or is not that of the checkpoint.
        DataError: a file is damaged, and `data.on_bad_media` is fail.
    """
    embedded = config.dataplane.uri is None
    train_set, eval_set = ("train", "eval") if embedded else (config.data.train, config.data.eval)
    recipes = load_recipes(Path(config.model.path), config.data.video.sampling())
    with contextlib.closing(Client(uri, timeout_s=config.dataplane.timeout_s)) as client:
        sets = [_ingest(client, "data.train", train_set), _ingest(client, "data.eval", eval_set)]
        flaws = [{"shard": bad.shard, "key": bad.key, "reason": bad.reason} for dataset in sets for bad in dataset.bad]
        if flaws and config.data.on_bad_media == "fail":
            raise bad_media_error(**flaws[0])
        train_media, eval_media = (
            check_first_samples(client, config, recipes, key, dataset.name, dataset.num_samples)
            for key, dataset in zip(("data.train", "data.eval"), sets)
        )
        reward = tuple(failure_on_a_sample(client, config, train_set))
    num_train, num_eval = (dataset.num_samples for dataset in sets)
    if config.data.num_eval_samples:
        num_eval = min(num_eval, config.data.num_eval_samples)
    rule = config.sampling_rule()
    batches = StepBatches(
        rule, PromptOrder(num_samples=num_train, seed=config.run.seed), in_turns=config.judges_in_turn
    )
    if state is not None:
        batches = StepBatches.from_state(rule, state, in_turns=config.judges_in_turn)
        if batches.order.num_samples != num_train:
            raise ConfigError(
                f"--resume: the checkpoint was made with {batches.order.num_samples} training samples, data.train has "
                f"{num_train}; use the same data"
            )
    start = RunStart(
        step=state["step"] if state else 0,
        checkpoint=str(checkpoint.absolute()) if checkpoint else None,
        train_set=train_set,
        eval_set=eval_set,
        num_train=num_train,
        num_eval=num_eval,
        flaws=tuple(flaws),
    )
    return StartPoint(
        start=start,
        batches=batches,
        train_media=train_media,
        eval_media=eval_media,
        warnings=(*reward, *_warnings(config, num_train)),
    )


def _warnings(config: Config, num_train: int) -> Iterator[str]:
    if config.train.prompts_per_step > num_train:
        yield (
            f"train.prompts_per_step is {config.train.prompts_per_step}, more than the {num_train} training samples: "
            "every step uses samples several times"
        )
    yield from unreachable_servers(config)
    both = files_in_both(config.data.train, config.data.eval) if config.dataplane.uri is None else []
    if both:
        yield (
            f"data.train and data.eval have {len(both)} file(s) in common, such as {both[0]}: the run trains on "
            "held-out samples, so eval/accuracy says nothing about others"
        )


def _ingest(client: Client, key: str, name: str) -> Dataset:
    try:
        return client.ingest(name)
    except DatasetError as error:
        raise ConfigError(f"{key}: {error}") from error
