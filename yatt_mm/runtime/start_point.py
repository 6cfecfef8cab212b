"""Where a run begins: its data sets, as the node finds them, and the state of the checkpoint."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataplane.client.client import Client
from dataplane.core.errors import BadRequestError
from dataplane.datasets.sampler import Source
from models.recipes.media_recipes import load_recipes
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.begun_steps import BegunStep
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.errors import CheckpointError, ConfigError
from yatt_mm.common.manifest import check_files
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompts import bad_media_error
from yatt_mm.preflight.first_samples import check_first_samples
from yatt_mm.preflight.judge_servers import open_keys
from yatt_mm.preflight.overlap import overlaps
from yatt_mm.preflight.reward_trial import try_rewards
from yatt_mm.preflight.run_sets import (
    FoundSet,
    find_held_out_sets,
    find_train_sets,
    sources_of,
)
from yatt_mm.protocol.control import Best, RunStart
from yatt_mm.reporting.report import QUARANTINE_FILE, read_records
from yatt_mm.runtime.run_dir import best_step_of

SLOW_INDEX_S = 10.0
"""From this time on, a run says how the next start can be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """Where a run begins."""

    start: RunStart
    batches: StepBatches | None
    """The prompts of the steps; None in an evaluation alone."""
    sets: tuple[str, ...]
    """A line about each data set: samples, media, layout, reward function."""
    warnings: tuple[str, ...]
    """What the user may not have meant."""


def find_start(
    config: Config,
    uri: str,
    checkpoint: Path | None,
    state: dict[str, Any] | None,
    begun: Mapping[int, BegunStep] = MappingProxyType({}),
) -> StartPoint:
    """Index the data sets, look at their first samples, and return where the run begins. `begun`: [step] the steps
    after the checkpoint with which it goes on.

    Raises:
        ConfigError: a data set cannot be used, or is not that of the checkpoint.
        DataError: a file is damaged, and `data.on_bad_media` is fail.
    """
    recipes = load_recipes(Path(config.model.path), config.data.video.sampling())
    with contextlib.closing(Client(uri, timeout_s=config.dataplane.timeout_s)) as client:
        started = time.perf_counter()
        train_sets, held_out = find_train_sets(client, config), find_held_out_sets(client, config)
        indexing_s = time.perf_counter() - started
        every = [*train_sets, *held_out]
        flaws = [(found.run_set.name, bad) for found in every for bad in found.bad]
        if flaws and config.data.on_bad_media == "fail":
            _, bad = flaws[0]
            raise bad_media_error(bad.shard, bad.key, bad.reason)
        firsts = [check_first_samples(client, config, recipes, found) for found in every]
        prompts = {found.key: first.prompt for found, first in zip(every, firsts)}
        reward = list(try_rewards(client, config, prompts))
    step = state["step"] if state else 0
    check_reference_folder(config, step)
    told = _told(config, step) if state is not None else frozenset()
    start = RunStart(
        step=step,
        checkpoint=str(checkpoint.absolute()) if checkpoint else None,
        ranks_at=step,
        is_begun=checkpoint is not None,
        train_sets=tuple(found.run_set for found in train_sets),
        eval_sets=tuple(found.run_set for found in held_out),
        best=_best_of(config, state),
        kl_coef=kl_coef_of(config, state),
        told=told,
        begun=dict(begun),
        flaws=tuple(
            {"set": of, "shard": bad.shard, "key": bad.key, "reason": bad.reason, "is_filtered": False}
            for of, bad in flaws
            if (of, bad.shard, bad.key, bad.reason) not in told
        ),
    )
    return StartPoint(
        start=start,
        batches=_batches(config, sources_of(config, train_sets), state) if config.trains else None,
        sets=tuple(_about(found, first.words) for found, first in zip(every, firsts)),
        warnings=(
            *reward,
            *_warnings(config, sum(one.num_samples for one in start.train_sets)),
            *_slow_index(config, every, indexing_s),
        ),
    )


def check_reference_folder(config: Config, step: int) -> None:
    """Check that the reference of the step after `step` is as it was written, if it is the policy of an earlier step.

    Raises:
        ConfigError: it is not there, or is damaged.
    """
    references = config.references
    if references is None or step >= config.train.steps:
        return
    folder = references.of(step + 1)
    if folder == references.first:
        return
    try:
        check_files(folder)
    except CheckpointError as error:
        raise ConfigError(
            f"--resume: the reference of step {step + 1} is the policy of an earlier step, which cannot be used: "
            f"{error}. If reference.renew_every is new or was changed, the run never wrote it: set it back, or name a "
            "model in reference.path and set reference.renew_every to 0"
        ) from error


def _batches(config: Config, sources: Sequence[Source], state: dict[str, Any] | None) -> StepBatches:
    rule = config.sampling_rule()
    if state is None:
        return StepBatches(rule, PromptOrder(sources, seed=config.run.seed), in_turns=config.judges_in_turn)
    try:
        return StepBatches.from_state(rule, state, sources, in_turns=config.judges_in_turn)
    except BadRequestError as error:
        raise ConfigError(f"--resume: data.train is not that of the checkpoint: {error}") from error


def kl_coef_of(config: Config, state: dict[str, Any] | None) -> float | None:
    """Return the weight of the divergence that a checkpoint has, unless the config now begins with another one."""
    before = (state or {}).get("config", {}).get("algorithm", {}).get("kl", {})
    if state is None or before.get("coef") != config.algorithm.kl.coef:
        return None
    value: float | None = state.get("kl_coef")
    return value


def _best_of(config: Config, state: dict[str, Any] | None) -> Best | None:
    """Return the best evaluation before a checkpoint, if its own checkpoint and its model are still there, and the
    metric is the same."""
    found = (state or {}).get("best")
    if state is None or found is None or state["config"]["eval"].get("keep_best") != config.eval.keep_best:
        return None
    steps = Checkpoints.of_run(config.run_dir).steps()
    is_there = found["step"] in (0, *steps) and best_step_of(config.run_dir) <= state["step"]
    return Best(**found) if is_there else None


def _told(config: Config, step: int) -> frozenset[tuple[str, str, str, str]]:
    """Return (set, shard, key, reason) of what cannot be used, but for training samples, as a run has told of it up to
    a step."""
    trained = {one.name for one in config.data.train}
    notices = read_records(config.run_dir / QUARANTINE_FILE, step)
    return frozenset(
        (of, one["shard"], one["key"], one["reason"])
        for one in notices
        if (of := one.get("set")) is not None and (of not in trained or "index" not in one)
    )


def _slow_index(config: Config, sets: Sequence[FoundSet], seconds: float) -> Iterator[str]:
    """Say how later starts need not wait again, if the run's own node took long to index tars."""
    is_kept = config.dataplane.uri is not None or config.dataplane.index_dir is not None
    if seconds >= SLOW_INDEX_S and not is_kept and any(".tar" in found.pattern for found in sets):
        yield (
            f"indexing the data sets took {seconds:.0f} s; with dataplane.index_dir=FOLDER a later start reads the "
            "indices of tars from that folder"
        )


def _about(found: FoundSet, media: str) -> str:
    one = found.run_set
    return f"{found.key}: {one.num_samples} samples ({media}); layout of {one.layout}; reward {one.reward}"


def _warnings(config: Config, num_train: int) -> Iterator[str]:
    if config.trains and config.train.prompts_per_step > num_train:
        yield (
            f"train.prompts_per_step is {config.train.prompts_per_step}, more than the {num_train} training samples: "
            "every step uses samples several times"
        )
    yield from open_keys(config)
    yield from overlaps(config)
