"""The actors of a run, but for its controllers. Those that a fault took are made again."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from models.flops import count_operations
from models.recipes.media_recipes import load_recipes
from models.registry import read_config
from yatt_mm.batching.rendezvous import Rendezvous
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.common.progress import STACK_SIGNAL, Done
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.control.actor import ControllerActor
from yatt_mm.hosts.run_hosts import RunHosts
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.placement.coordinator import Coordinator
from yatt_mm.placement.state_changes import StateChanges
from yatt_mm.protocol.control import RunStart, Team
from yatt_mm.protocol.placement_model import Role, State, Unit
from yatt_mm.runtime.actors import create
from yatt_mm.runtime.judge_actors import judge_makers
from yatt_mm.runtime.makers import Maker, create_keeper, create_reward_workers, engine_makers, rank_makers
from yatt_mm.runtime.run_dir import BEST_DIR, EXPORT_DIR
from yatt_mm.runtime.site import Site, log_file
from yatt_mm.runtime.starting import start

STOP_DEADLINE_S = 30.0
GONE_S = 5.0
"""The seconds in which an actor that Ray was told to end is gone."""
STACKS_S = 0.5
"""The seconds that processes need to write down where they are."""


class Crew:
    """The actors of a run, but for its controllers."""

    def __init__(
        self,
        stack: ExitStack,
        config: Config,
        *,
        run_id: str,
        node: RunNode,
        hosts: RunHosts,
        run_start: RunStart,
        batches: StepBatches | None,
        weights_dir: Path,
        scratch: Path,
        tell: Callable[[str], None],
    ) -> None:
        """Make and start all of them; `stack` ends them. `scratch`: a folder that only the user can enter, for files in
        which the training ranks meet, with the keys of judges' servers. `tell` gets a line when engines or ranks are
        ready.

        Raises:
            WorkerError: an actor failed to start, or took too long.
        """
        self.hosts = hosts
        self.restart_count = 0
        self._stack = stack
        self._config = config
        self._run_id = run_id
        self._weights_dir = weights_dir
        self._scratch = scratch
        self._tell = tell
        self._site = Site(
            stack=stack,
            config=config,
            node=node,
            placement=config.make_placement(),
            hosts=hosts,
        )
        self._progress = hosts.progress(self._site.placement)
        self.rendezvous: Any = self._create_here(Rendezvous, "rendezvous", concurrency=4 * config.controllers.num + 8)(
            num_controllers=config.controllers.num,
            deadline_s=config.controllers.deadline_s,
            batches=batches,
            begun={begun.step: begun.sampling for begun in run_start.begun.values()},
            journal_bytes=node.journal_bytes,
        )
        self._reward_workers = create_reward_workers(self._site, run_start.rewards)
        self.keeper = create_keeper(self._site)
        self._makers = self._unit_makers()
        self.units: dict[Unit, Any] = {unit: make() for unit, make in self._makers.items()}
        self.coordinator: Any = None
        self._states = {
            unit: State.AWAKE if unit.role is Role.TRAIN else State.ASLEEP for unit in self._site.placement.units
        }
        stack.callback(self._stop_engines)
        self._start(self.units)

    def make_again(self, lost: Collection[Unit], *, keeper: bool) -> None:
        """Make and start these units again, and the keeper if it was lost. All others are asleep.

        Raises:
            WorkerError: one of them failed to start, or took too long.
        """
        self.restart_count += 1
        self._end(lost)
        if keeper:
            self._kill({"the keeper": self.keeper})
            self.keeper = create_keeper(self._site)
        self.units |= {unit: self._makers[unit]() for unit in lost}
        self._states = {
            unit: State.AWAKE if unit.role is Role.TRAIN and unit in lost else State.ASLEEP for unit in self.units
        }
        self._stack.callback(self._stop_engines)  # before their actors are ended, which were made after the last one
        self._start({unit: self.units[unit] for unit in self.units if unit in lost})

    def team(self) -> Team:
        """Return the handles of all of them for the next controllers, with a coordinator of its own."""
        config, site = self._config, self._site
        deadline_s = config.controllers.deadline_s / 2
        agents = self.hosts.give_units(site.placement, self.units)
        self.coordinator = self._create_here(Coordinator, "coordinator", concurrency=1000)(
            placement=site.placement,
            changes=StateChanges(site.placement, self.units, agents=agents, deadline_s=deadline_s),
            states=self._states,
            requests_per_engine=config.requests_per_engine(),
            num_controllers=config.controllers.num,
            division=config.division(),
        )
        return Team(
            rendezvous=self.rendezvous,
            coordinator=self.coordinator,
            engines=self._of_pool("rollout"),
            reward_workers=tuple(self._reward_workers),
            keeper=self.keeper,
            judges={name: self._of_pool(name) for name in config.reward.judges},
            ranks=self._of_pool("train"),
            parallel=config.parallel(),
            operations=count_operations(
                read_config(Path(config.model.path)),
                freeze=config.train.freeze,
                adapted=lora.parts if (lora := config.train.lora.settings()) else None,
                recompute=config.train.recompute,
            ),
            placement=site.placement,
            progress=self._progress,
            nodes=site.hosts.nodes,
            dataplane_uri=site.node.uri,
            recipes=load_recipes(Path(config.model.path), config.data.video.sampling()),
            weights_dir=str(self._weights_dir),
            checkpoints=Checkpoints.of_run(config.run_dir.absolute(), keep=config.checkpoint.keep),
            export_dir=str(config.run_dir.absolute() / EXPORT_DIR),
            best_dir=str(config.run_dir.absolute() / BEST_DIR),
            restart_count=self.restart_count,
            run_id=self._run_id,
        )

    def start_controllers(self, team: Team, run_start: RunStart) -> list[Any]:
        """Start and return `controllers.num` controller actors, divided over the hosts. They are idle until they are
        told to run."""
        controllers = []
        for c in range(self._config.controllers.num):
            log, host = log_file(self._config, f"controller-{c}"), self.hosts.of(c)
            construct = create(self._stack, ControllerActor, log=log, concurrency=1, **host.placed())
            team_there = replace(team, dataplane_uri=host.uri)
            controllers.append(construct(index=c, config=self._config, team=team_there, start=run_start))
        return controllers

    def _unit_makers(self) -> dict[Unit, Maker]:
        site = self._site
        judges = judge_makers(site, self.rendezvous, self._scratch)
        makers = {"rollout": engine_makers(site), **judges, "train": rank_makers(site)}
        units = {(unit.pool, unit.index): unit for unit in site.placement.units}
        return {units[pool, i]: make for pool, of_pool in makers.items() for i, make in enumerate(of_pool)}

    def _of_pool(self, pool: str) -> tuple[Any, ...]:
        return tuple(self.units[unit] for unit in self._site.placement.pools().get(pool, ()))

    def _create_here(self, body: type, name: str, *, concurrency: int) -> Any:
        """Return the constructor of an actor on the launcher's host."""
        log, host = log_file(self._config, name), self.hosts.own
        return create(self._stack, body, log=log, concurrency=concurrency, **host.placed())

    def _start(self, units: dict[Unit, Any]) -> None:
        store = self._store(units)
        deadline_s = self._config.faults.start_deadline_s
        start(units, store, in_turns=bool(self.hosts.devices.gpus), deadline_s=deadline_s, tell=self._tell)

    def _store(self, units: Mapping[Unit, Any]) -> str:
        """Return where the training ranks meet: a file that only this user can reach, or in a run over several hosts a
        port of the first rank's host."""
        first = next((unit for unit in units if unit.role is Role.TRAIN and not unit.index), None)
        if first is None or len(self.hosts.with_devices) == 1:
            return f"file://{self._scratch / f'ranks_store-{self.restart_count}'}"
        call = (str(first), units[first].meet.remote(self._site.host(first.devices).node.address))
        (store,) = wait_all([call], what="its start", deadline_s=self._config.faults.start_deadline_s)
        return str(store)

    def _stop_engines(self) -> None:
        """Let engines end their own processes. One that does not is ended with its actor right after."""
        self._shut_down(self.units)

    def _shut_down(self, units: Collection[Unit]) -> None:
        calls = [self.units[unit].shutdown.remote() for unit in units if unit.role is not Role.TRAIN]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=STOP_DEADLINE_S)

    def end_controllers(self, controllers: Sequence[Any]) -> None:
        """End all controllers, and the coordinator, which would go on changing the states of engines and ranks."""
        coordinator = {} if self.coordinator is None else {"the coordinator": self.coordinator}
        self._kill({f"controller {c}": actor for c, actor in enumerate(controllers)} | coordinator)

    def _end(self, units: Collection[Unit]) -> None:
        """End these units, and wait until their processes are gone."""
        self._shut_down(units)
        self._kill({str(unit): self.units[unit] for unit in units})

    def _kill(self, actors: Mapping[str, Any]) -> None:
        """End these actors, given by their names, and wait until their processes are gone."""
        for actor in actors.values():
            ray.kill(actor)
        gone = {actor.__ray_ready__.remote(): name for name, actor in actors.items()}
        _, alive = ray.wait(list(gone), num_returns=len(gone), timeout=GONE_S) if gone else ([], [])
        for call in alive:  # one that stands still does not hear Ray
            self.hosts.signal(gone[call], signal.SIGKILL)
        if alive:
            ray.wait(alive, num_returns=len(alive), timeout=STOP_DEADLINE_S)

    def write_stacks(self, units: Collection[Unit]) -> None:
        """Let the processes of these units write down where they are, in their logs."""
        for unit in units:
            self.hosts.signal(str(unit), STACK_SIGNAL)
        if units:
            time.sleep(STACKS_S)

    def done_by(self, units: Collection[Unit]) -> dict[Unit, Done]:
        """Return what these units have done so far, without those that have not begun."""
        progress = replace(self._progress, folder=self._scratch)
        found = zip(units, progress.of([str(unit) for unit in units]), strict=True)
        return {unit: done for unit, done in found if done is not None}
