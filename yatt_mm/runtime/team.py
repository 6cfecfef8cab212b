"""Starts the actors of a run on the devices that the placement gives them, and stops them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray

from models.flops import count_operations
from models.recipes.media_recipes import load_recipes
from models.registry import read_config
from yatt_mm.batching.rendezvous import Rendezvous
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.control.actor import ControllerActor
from yatt_mm.keeper.actor import KeeperActor
from yatt_mm.placement.coordinator import Coordinator
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.protocol.control import RunStart, Team
from yatt_mm.protocol.placement_model import Placement, Role, State, Unit
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.protocol.training import TrainSpec
from yatt_mm.rewards.actor import RewardActor
from yatt_mm.rollout.actor import RolloutActor
from yatt_mm.runtime.actors import create
from yatt_mm.runtime.cluster import reserved_devices
from yatt_mm.runtime.judge_actors import create_judges
from yatt_mm.runtime.run_dir import BEST_DIR, EXPORT_DIR
from yatt_mm.runtime.run_node import RunNode
from yatt_mm.runtime.site import Site, log_file
from yatt_mm.training.actor import TrainActor

START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 30.0


def build_team(
    stack: ExitStack,
    config: Config,
    *,
    run_id: str,
    node: RunNode,
    start: RunStart,
    batches: StepBatches | None,
    weights_dir: Path,
    scratch: Path,
    tell: Callable[[str], None],
) -> Team:
    """Start every actor except the controllers; `stack` ends them. `scratch`: a folder that only the user can enter,
    with the keys of judges' servers, and for a file in which the training ranks meet. `tell` gets a line when engines
    or ranks are ready.

    Raises:
        WorkerError: an actor failed to start, or took too long.
    """
    reserved = reserved_devices(config.placement.num_devices, deadline_s=config.controllers.deadline_s)
    site = Site(
        stack=stack,
        config=config,
        node=node,
        placement=config.make_placement(),
        devices=stack.enter_context(reserved),
    )
    engines, ranks = _create_engines(site), _create_ranks(site)
    rewards = _create_reward_workers(stack, config, start.rewards, node.uri)
    keeper = _create_keeper(stack, config, node.uri)
    rendezvous = create(
        stack, Rendezvous, log=log_file(config, "rendezvous"), concurrency=4 * config.controllers.num + 8
    )(num_controllers=config.controllers.num, deadline_s=config.controllers.deadline_s, batches=batches)
    judges = create_judges(site, rendezvous, scratch)
    coordinator = create(stack, Coordinator, log=log_file(config, "coordinator"), concurrency=1000)(
        placement=site.placement,
        workers=_workers(site.placement, engines, judges, ranks),
        states={unit: State.AWAKE if unit.role is Role.TRAIN else State.ASLEEP for unit in site.placement.units},
        requests_per_engine=config.requests_per_engine(),
        division=config.division(),
        deadline_s=config.controllers.deadline_s / 2,
    )
    stack.callback(_stop_engines, [*engines, *(judge for of_one in judges.values() for judge in of_one)])
    _start(site, engines, judges, ranks, scratch / "ranks_store", tell)
    return Team(
        rendezvous=rendezvous,
        coordinator=coordinator,
        engines=tuple(engines),
        reward_workers=tuple(rewards),
        keeper=keeper,
        judges=judges,
        ranks=tuple(ranks),
        parallel=config.parallel(),
        operations=count_operations(
            read_config(Path(config.model.path)), freeze=config.train.freeze, recompute=config.train.recompute
        ),
        placement=site.placement,
        dataplane_uri=node.uri,
        recipes=load_recipes(Path(config.model.path), config.data.video.sampling()),
        weights_dir=str(weights_dir),
        checkpoints=Checkpoints(root=config.run_dir.absolute() / "checkpoints", keep=config.checkpoint.keep),
        export_dir=str(config.run_dir.absolute() / EXPORT_DIR),
        best_dir=str(config.run_dir.absolute() / BEST_DIR),
        restart_count=0,
        run_id=run_id,
    )


def _start(
    site: Site,
    engines: list[Any],
    judges: dict[str, tuple[Any, ...]],
    ranks: list[Any],
    store: Path,
    tell: Callable[[str], None],
) -> None:
    """Start the actors: on GPUs one after another, because an engine takes its device's memory before it sleeps; on the
    CPU all at once."""
    turns: list[list[tuple[str, Any, tuple[str, ...]]]]
    turns = [[(f"engine {number}", engine.start, ()) for number, engine in enumerate(engines)]]
    for name, of_one in judges.items():
        turns += [[(f"engine {number} of judge {name}", judge.start, ()) for number, judge in enumerate(of_one)]]
    turns += [[(f"training rank {number}", rank.start, (f"file://{store}",)) for number, rank in enumerate(ranks)]]
    ready = _tell_when_ready([[name for name, *_ in turn] for turn in turns], tell)
    if not site.devices.gpus:
        turns = [list(chain.from_iterable(turns))]
    for turn in turns:
        calls = [(name, start.remote(*arguments)) for name, start, arguments in turn]
        wait_all(calls, what="its start", deadline_s=START_DEADLINE_S, on_done=ready)


def _tell_when_ready(groups: Sequence[Sequence[str]], tell: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that takes the name of each part that is ready, and tells when all of its group are."""
    started, missing = time.monotonic(), [set(names) for names in groups]

    def ready(name: str) -> None:
        for names, of_group in zip(groups, missing):
            if name in of_group:
                of_group.remove(name)
                if not of_group:
                    tell(f"{_together(names)}: ready after {time.monotonic() - started:.1f} s")

    return ready


def _together(names: Sequence[str]) -> str:
    """Return the names of parts that are numbered from 0 as one: `engine 0`, `engine 1` give `2 engines`."""
    if len(names) == 1:
        return names[0]
    kind, _, rest = names[0].partition(" 0")
    return f"{len(names)} {kind}s{rest}"


def _workers(
    placement: Placement, engines: list[Any], judges: dict[str, tuple[Any, ...]], ranks: list[Any]
) -> dict[Unit, Any]:
    """Return the actor of each unit."""
    pools = {"rollout": engines, "train": ranks, **judges}
    return {unit: pools[unit.pool][unit.index] for unit in placement.units}


def start_controllers(stack: ExitStack, config: Config, team: Team, start: RunStart) -> list[Any]:
    """Start and return `controllers.num` controller actors. They are idle until they are told to run."""
    return [
        create(stack, ControllerActor, log=log_file(config, f"controller-{c}"), concurrency=1)(
            index=c, config=config, team=team, start=start
        )
        for c in range(config.controllers.num)
    ]


def _create_engines(site: Site) -> list[Any]:
    config = site.config
    spec = EngineSpec(
        model_dir=site.model_dir,
        dtype=config.model.dtype,
        max_model_len=config.rollout.max_model_len,
        max_num_seqs=config.rollout.max_num_seqs,
        kv_cache_bytes=config.rollout.kv_cache_memory,
        max_images_per_prompt=config.rollout.max_images_per_prompt,
        max_videos_per_prompt=config.rollout.max_videos_per_prompt,
        tp=config.rollout.tp,
        deadline_s=config.controllers.deadline_s,
        scope=site.node.scope,
        durable=site.node.durable,
        chat_template_args=config.data.chat_template_args,
    )
    return [
        site.create(RolloutActor, devices, log=f"engine-{engine}", concurrency=1000)(
            index=engine,
            spec=replace(spec, cores=site.cores(devices)),
            dataplane_uri=site.node.uri,
            num_controllers=config.controllers.num,
            deadline_s=config.controllers.deadline_s,
        )
        for engine, devices in enumerate(site.placement.devices(Role.ROLLOUT))
    ]


def _create_ranks(site: Site) -> list[Any]:
    config, train = site.config, site.config.train
    spec = TrainSpec(
        model_dir=site.model_dir,
        dtype=config.model.dtype,
        optim=AdamSettings(
            lr=train.lr,
            weight_decay=train.weight_decay,
            betas=train.betas,
            clip_grad=train.clip_grad,
            warmup_steps=train.warmup_steps,
            total_updates=train.steps * train.num_minibatches,
            lr_final_frac=train.lr_final_frac,
            offload_frac=train.optimizer_offload_fraction,
        ),
        temperature=config.rollout.temperature,
        clip_low=config.algorithm.clip_low,
        clip_high=config.algorithm.clip_high,
        entropy_coef=config.algorithm.entropy_coef,
        seed=config.run.seed,
        timeout_s=config.dataplane.timeout_s,
        carrier=config.carrier,
        num_receivers=sum(map(len, site.placement.devices(Role.ROLLOUT))),
        deadline_s=config.controllers.deadline_s,
        recompute=train.recompute,
        freeze=tuple(train.freeze),
        overlap_grad_reduce=train.overlap_grad_reduce,
        skipped_dir=str(config.skipped_dir.absolute()),
    )
    return [
        site.create(TrainActor, devices, log=f"rank-{rank}", concurrency=1)(
            rank=rank,
            spec=replace(spec, cores=site.cores(devices)),
            parallel=config.parallel(),
            dataplane_uri=site.node.uri,
        )
        for rank, devices in enumerate(site.placement.devices(Role.TRAIN))
    ]


def _create_reward_workers(
    stack: ExitStack, config: Config, functions: tuple[str, ...], dataplane_uri: str
) -> list[Any]:
    return [
        create(stack, RewardActor, log=log_file(config, f"reward-{worker}"), concurrency=1, max_restarts=-1)(
            functions=functions,
            weights=config.reward.part_weights,
            dataplane_uri=dataplane_uri,
            timeout_s=config.dataplane.timeout_s,
            deadline_s=config.reward.deadline_s,
            longest_s=config.controllers.deadline_s / 3,  # a call is made again if a worker dies
        )
        for worker in range(config.reward.num_workers)
    ]


def _create_keeper(stack: ExitStack, config: Config, dataplane_uri: str) -> Any:
    if config.rollouts.keep == "none":
        return None
    return create(stack, KeeperActor, log=log_file(config, "keeper"), concurrency=1)(
        run_dir=config.run_dir.absolute(),
        num_controllers=config.controllers.num,
        dataplane_uri=dataplane_uri,
        timeout_s=config.dataplane.timeout_s,
    )


def _stop_engines(engines: list[Any]) -> None:
    """Let engines end their own processes. An engine that does not is ended with its actor right after."""
    ray.wait([engine.shutdown.remote() for engine in engines], num_returns=len(engines), timeout=STOP_DEADLINE_S)
