"""How the actors of a run are made from its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from yatt_mm.config.run_config import Config
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.keeper.actor import KeeperActor
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.protocol.placement_model import Role
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.protocol.training import CriticSpec, TrainSpec
from yatt_mm.rewards.actor import RewardActor
from yatt_mm.rollout.actor import RolloutActor
from yatt_mm.runtime.actors import create
from yatt_mm.runtime.site import Site, log_file
from yatt_mm.training.actor import TrainActor

Maker = Callable[[], Any]
"""Makes an actor, each time another one, and returns its handle. It is not started then."""


def engine_makers(site: Site) -> list[Maker]:
    """Return what makes each engine of the policy."""
    config, spec = site.config, engine_spec(site.config, site.node)
    return [
        partial(
            site.create(RolloutActor, devices, log=f"engine-{engine}", concurrency=1000),
            index=engine,
            spec=replace(spec, cores=site.cores(devices)),
            dataplane_uri=site.host(devices).uri,
            num_controllers=config.controllers.num,
            deadline_s=config.controllers.deadline_s,
        )
        for engine, devices in enumerate(site.placement.devices(Role.ROLLOUT))
    ]


def engine_spec(config: Config, node: RunNode) -> EngineSpec:
    """Return what the settings of all engines of the policy have in common: all but their cores."""
    return EngineSpec(
        model_dir=absolute(config.model.path),
        dtype=config.model.dtype,
        max_model_len=config.rollout.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        kv_cache_bytes=config.rollout.kv_cache_memory,
        max_images_per_prompt=config.rollout.max_images_per_prompt,
        max_videos_per_prompt=config.rollout.max_videos_per_prompt,
        tp=config.rollout.tp,
        deadline_s=config.controllers.deadline_s,
        scope=node.scope,
        durable=node.durable,
        chat_template_args=config.data.chat_template_args,
    )


def rank_makers(site: Site) -> list[Maker]:
    """Return what makes each training rank."""
    spec = train_spec(site.config, num_receivers=sum(map(len, site.placement.devices(Role.ROLLOUT))))
    return [
        partial(
            site.create(TrainActor, devices, log=f"rank-{rank}", concurrency=1),
            rank=rank,
            spec=replace(spec, cores=site.cores(devices), node_id=site.node_id(devices)),
            parallel=site.config.parallel(),
            dataplane_uri=site.host(devices).uri,
        )
        for rank, devices in enumerate(site.placement.devices(Role.TRAIN))
    ]


def train_spec(config: Config, *, num_receivers: int) -> TrainSpec:
    """Return what the settings of all training ranks have in common: all but their cores and their host's node.

    Args:
        num_receivers: the number of engine processes that receive a model.
    """
    train = config.train
    optim = AdamSettings(
        lr=train.lr,
        weight_decay=train.weight_decay,
        betas=train.betas,
        clip_grad=train.clip_grad,
        warmup_steps=train.warmup_steps,
        total_updates=train.steps * train.num_minibatches,
        lr_final_frac=train.lr_final_frac or 0.0,
        schedule=train.lr_schedule,
        decay_updates=train.num_decay_updates,
        part_lr=train.part_lr,
        offload_frac=train.optimizer_offload_fraction,
    )
    return TrainSpec(
        model_dir=absolute(config.model.path),
        dtype=config.model.dtype,
        optim=optim,
        temperature=config.rollout.temperature,
        algorithm=config.algorithm.settings(),
        seed=config.run.seed,
        timeout_s=config.dataplane.timeout_s,
        carrier=config.carrier,
        num_receivers=num_receivers,
        deadline_s=config.controllers.deadline_s,
        recompute=train.recompute,
        freeze=tuple(train.freeze),
        lora=train.lora.settings(),
        overlap_grad_reduce=train.overlap_grad_reduce,
        references=config.references,
        skipped_dir=str(config.skipped_dir.absolute()),
        critic=critic_spec(config, optim),
    )


def critic_spec(config: Config, optim: AdamSettings) -> CriticSpec | None:
    """Return the settings of the critic of a policy with this optimizer; None if there is no critic."""
    if config.critic_path is None:
        return None
    lr = config.critic.lr or optim.lr
    part_lr = {part: rate * (lr / optim.lr) for part, rate in optim.part_lr.items()}
    return CriticSpec(model_dir=absolute(config.critic_path), optim=replace(optim, lr=lr, part_lr=part_lr))


def absolute(folder: str) -> str:
    """Return the path for processes with another working directory."""
    return str(Path(folder).absolute())


def create_reward_workers(site: Site, functions: tuple[str, ...]) -> list[Any]:
    """Return the reward workers, divided over the hosts, of which each has one. Ray starts those again that die."""
    config = site.config
    return [
        create(
            site.stack,
            RewardActor,
            log=log_file(config, f"reward-{worker}"),
            concurrency=1,
            max_restarts=-1,
            **site.hosts.of(worker).placed(),
        )(
            functions=functions,
            weights=config.reward.part_weights,
            ranges=config.reward.part_ranges,
            dataplane_uri=site.hosts.of(worker).uri,
            timeout_s=config.dataplane.timeout_s,
            deadline_s=config.reward.deadline_s,
            longest_s=config.controllers.deadline_s / 3,  # a call is made again if a worker dies
        )
        for worker in range(max(config.reward.num_workers, config.placement.num_hosts))
    ]


def create_keeper(site: Site) -> Any:
    """Return the keeper, or None for an evaluation alone that keeps no rollouts."""
    config, node = site.config, site.node
    if config.rollouts.keep == "none" and not config.trains:
        return None
    log = log_file(config, "keeper")
    return create(site.stack, KeeperActor, log=log, concurrency=1, **site.hosts.own.placed())(
        run_dir=config.run_dir.absolute(),
        num_controllers=config.controllers.num,
        dataplane_uri=node.uri,
        timeout_s=config.dataplane.timeout_s,
        scope=node.scope,
        durable=node.durable,
    )
