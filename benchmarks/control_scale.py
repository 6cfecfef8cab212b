"""Measures what the control of a step costs with many devices: states, meetings, publishing, and the plan.

    python benchmarks/control_scale.py
    python benchmarks/control_scale.py --real 16 64 --fakes 64 512 --json

Every device has an engine and a training rank; a host has `--devices-per-host` of them, an agent and a controller. The
real rows have an actor of Ray for each of these, which replies at once, and the run's own coordinator and rendezvous.
What limits a run is the one process
that does something for all: the columns are its processor seconds. In the rows of fakes these two are in this process,
and calls cost what one call of Ray costs in the smallest real row. Where a real row has as many devices, both can be
compared.

states: the coordinator, for the three changes of phase of a step. meetings: the rendezvous, for `--meetings` meetings
of all controllers. plan: each controller, for `--samples` samples per device. publish: a controller, for the calls to
its own ranks and engines.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import psutil
import ray

from benchmarks import plan_scale
from benchmarks.common.runs import show
from yatt_mm.batching.meeting import MeetingKey
from yatt_mm.batching.packed import Packed
from yatt_mm.batching.rendezvous import Rendezvous
from yatt_mm.common.held_memory import StateReport
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.hosts.agent import HostAgent
from yatt_mm.placement.coordinator import Coordinator
from yatt_mm.placement.state_changes import StateChange, StateChanges, by_host
from yatt_mm.protocol.placement_model import Engines, Phase, Placement, Role, State, Unit, full_colocation
from yatt_mm.runtime.cluster import ray_session

DEADLINE_S = 300.0
STEP = (Phase.TRAIN, Phase.PUBLISH, Phase.ROLLOUT)
"""The changes of phase of a step."""
GROUP_BYTES = 400
"""What a controller brings to the meeting before the plan for each of its groups of eight samples, compressed."""


class Meter:
    """Counts the processor time of the process that it is in."""

    def processor_s(self) -> float:
        """Return the seconds so far."""
        return time.process_time()

    def resident_mib(self) -> float:
        """Return the memory of the process in MiB."""
        return psutil.Process().memory_info().rss / 2**20


class MeteredCoordinator(Coordinator, Meter):
    """The coordinator of the real rows."""


class MeteredRendezvous(Rendezvous, Meter):
    """The rendezvous of the real rows."""


class Worker:
    """A training rank or an engine that replies at once."""

    def set_state(self, state: State) -> StateReport:
        """Reply."""
        return StateReport(held_bytes=0)

    def publish(self, path: str, version: int) -> None:
        """Reply."""


class Agent(HostAgent):
    """An agent that starts nothing on its host."""

    def __init__(self) -> None:
        self._workers = {}


class ControllerActor:
    """A controller that only meets the others and calls its workers."""

    def meet(self, rendezvous: Any, controller: int, first: int, num: int, value: bytes) -> None:
        """Come to some meetings, the first of which has this number. The value goes to the first one."""
        for sequence in range(first, first + num):
            brought = Packed.of(value if sequence == first else b"")
            call = rendezvous.gather.remote(key_of(sequence), controller, brought)
            wait_all([("the rendezvous", call)], what="a meeting", deadline_s=DEADLINE_S)

    def publish(self, workers: Sequence[Any]) -> float:
        """Call all these workers once, and return the processor seconds of this process."""
        began = time.process_time()
        calls = [(str(number), worker.publish.remote("", 0)) for number, worker in enumerate(workers)]
        wait_all(calls, what="publishing", deadline_s=DEADLINE_S)
        return time.process_time() - began


def key_of(sequence: int) -> MeetingKey:
    """Return the name of a meeting."""
    return MeetingKey(step=1, phase="rollout", restart_count=0, sequence=sequence)


def groups_of(options: argparse.Namespace) -> bytes:
    """Return as many bytes as a controller brings before the plan."""
    return os.urandom(GROUP_BYTES * options.samples * options.devices_per_host // 8)


def placement_of(num_devices: int, devices_per_host: int) -> Placement:
    """Return a placement with an engine and a rank on each device."""
    placement = full_colocation(num_devices=num_devices, rollout=Engines(num=num_devices), judges={})
    return replace(placement, devices_per_host=devices_per_host)


def coordinator_options(placement: Placement, changes: StateChanges, num_controllers: int) -> dict[str, Any]:
    """Return the arguments of the coordinator."""
    return {
        "placement": placement,
        "changes": changes,
        "states": {unit: State.AWAKE if unit.role is Role.TRAIN else State.ASLEEP for unit in placement.units},
        "requests_per_engine": {"rollout": 64},
        "num_controllers": num_controllers,
        "division": None,
    }


class Spinning:
    """The handle of a fake: a call takes `call_s` of the processor, and gets its reply at once."""

    def __init__(self, reply: Callable[..., Any], call_s: float) -> None:
        self._reply = reply
        self._call_s = call_s

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        """Do what a call of Ray does to the caller."""
        end = time.process_time() + self._call_s
        while time.process_time() < end:
            pass
        future = asyncio.get_running_loop().create_future()
        future.set_result(self._reply(*arguments))
        return future


class FakeAgent:
    """An agent whose units all reply at once."""

    def __init__(self, call_s: float) -> None:
        def reply(names: Sequence[str], state: State, deadline_s: float) -> list[StateChange]:
            return [StateChange(report=StateReport(held_bytes=0), seconds=0.0) for _ in names]

        self.set_state = Spinning(reply, call_s)


def fake_states(num_devices: int, options: argparse.Namespace, call_s: float) -> float:
    """Return the processor seconds of the coordinator for the changes of a step, in this process."""
    placement = placement_of(num_devices, options.devices_per_host)
    agents = [FakeAgent(call_s) for _ in range(placement.num_hosts)]
    changes = StateChanges(placement, {}, agents=agents, deadline_s=DEADLINE_S)
    coordinator = Coordinator(**coordinator_options(placement, changes, placement.num_hosts))

    async def run() -> float:
        took = []
        for step in range(options.repeats + 1):
            began = time.process_time()
            for phase in STEP:
                await coordinator.enter(phase, step, True)
            took.append(time.process_time() - began)
            await coordinator.take_report()
        return median(took[1:])

    return asyncio.run(run())


def fake_meetings(num_devices: int, options: argparse.Namespace, call_s: float) -> float:
    """Return the processor seconds of the rendezvous for some meetings, in this process."""
    num = num_devices // options.devices_per_host
    rendezvous = Rendezvous(num_controllers=num, deadline_s=DEADLINE_S, batches=None)
    value = Packed.of(groups_of(options))
    entry = Spinning(lambda: None, call_s)

    async def come(controller: int) -> None:
        for sequence in range(options.meetings):
            await entry.remote()
            await rendezvous.gather(key_of(sequence), controller, Packed.of(b"") if sequence else value)

    async def run() -> float:
        began = time.process_time()
        await asyncio.gather(*(come(controller) for controller in range(num)))
        return time.process_time() - began

    return asyncio.run(run())


def real_row(num_devices: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure with actors of Ray, and return one line of the results table."""
    placement = placement_of(num_devices, options.devices_per_host)
    num_hosts = placement.num_hosts
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(ray_session(None, num_cpus=2, scratch=scratch, env={}))

        def actor(body: type, concurrency: int = 1, **arguments: Any) -> Any:
            remote: Any = ray.remote(body).options(num_cpus=0, max_concurrency=concurrency, enable_task_events=False)
            return remote.remote(**arguments)

        workers: dict[Unit, Any] = {unit: actor(Worker) for unit in placement.units}
        agents = [actor(Agent, 16) for _ in range(num_hosts)]
        controllers = [actor(ControllerActor) for _ in range(num_hosts)]
        rendezvous = actor(
            MeteredRendezvous, 4 * num_hosts + 8, num_controllers=num_hosts, deadline_s=DEADLINE_S, batches=None
        )
        changes = StateChanges(placement, {}, agents=agents, deadline_s=DEADLINE_S)
        coordinator = actor(MeteredCoordinator, 1000, **coordinator_options(placement, changes, num_hosts))
        of_hosts = by_host(placement, workers)
        ray.get([agent.take_units.remote(units) for agent, units in zip(agents, of_hosts)], timeout=DEADLINE_S)
        for _ in range(2):  # connections between processes are made by the first calls
            before, states = ray.get(coordinator.processor_s.remote()), []
            for step in range(options.repeats):
                for phase in STEP:
                    ray.get(coordinator.enter.remote(phase, step, True), timeout=DEADLINE_S)
                after = ray.get(coordinator.processor_s.remote())
                states.append(after - before)
                before = after
                ray.get(coordinator.take_report.remote())
        value = groups_of(options)
        for first in (0, options.meetings):
            before = ray.get(rendezvous.processor_s.remote())
            coming = [
                controller.meet.remote(rendezvous, number, first, options.meetings, value)
                for number, controller in enumerate(controllers)
            ]
            ray.get(coming, timeout=DEADLINE_S)
            meetings = ray.get(rendezvous.processor_s.remote()) - before
        publish = [
            ray.get(controllers[0].publish.remote(list(of_hosts[0].values())), timeout=DEADLINE_S)
            for _ in range(options.repeats + 1)
        ]
        memory = [ray.get(one.resident_mib.remote()) for one in (coordinator, rendezvous)]
    return {
        "devices": num_devices,
        "actors": "Ray's",
        "states": median(states),
        "meetings": meetings,
        "plan": plan_s(num_devices, options),
        "publish": median(publish[1:]),
        "coordinator MiB": memory[0],
        "rendezvous MiB": memory[1],
    }


def fake_row(num_devices: int, options: argparse.Namespace, costs: Mapping[str, float]) -> dict[str, Any]:
    """Measure with fakes, and return one line of the results table. `costs`: of one call, by column."""
    return {
        "devices": num_devices,
        "actors": "fakes",
        "states": fake_states(num_devices, options, costs["states"]),
        "meetings": fake_meetings(num_devices, options, costs["meetings"]),
        "plan": plan_s(num_devices, options),
    }


def plan_s(num_devices: int, options: argparse.Namespace) -> float:
    """Return the processor seconds in which a controller plans a step for this number of replicas."""
    samples = max(num_devices * options.samples, 8)
    asked = argparse.Namespace(samples=samples, replicas=num_devices, max_tokens=16384, repeats=options.repeats)
    return float(plan_scale.measure(8, asked)["seconds"])


def costs_of(row: Mapping[str, Any], options: argparse.Namespace) -> dict[str, float]:
    """Return what one call of Ray costs the coordinator, and one the rendezvous, by a real row."""
    num_devices, num_hosts = row["devices"], row["devices"] // options.devices_per_host
    # TRAIN and ROLLOUT put one role to sleep and wake one up; PUBLISH changes both to the same state
    num_calls = {"states": 6 * num_hosts, "meetings": options.meetings * num_hosts}
    without = {
        "states": fake_states(num_devices, options, 0.0),
        "meetings": fake_meetings(num_devices, options, 0.0),
    }
    return {name: max(0.0, row[name] - without[name]) / num for name, num in num_calls.items()}


def main() -> None:
    """Measure and print the table. With --json, print one more line for programs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=int, nargs="+", default=[16, 64], help="devices of rows with actors (16 64)")
    parser.add_argument("--fakes", type=int, nargs="+", default=[64, 512], help="devices of rows with fakes (64 512)")
    parser.add_argument("--devices-per-host", type=int, default=8, help="devices of each host (8)")
    parser.add_argument("--samples", type=int, default=128, help="samples per device and step (128)")
    parser.add_argument("--meetings", type=int, default=20, help="meetings of a step (20)")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps (5)")
    parser.add_argument("--json", action="store_true", help='end with one line {"rows": [...]}')
    options = parser.parse_args()
    rows = [real_row(num, options) for num in options.real]
    costs = costs_of(rows[0], options)
    rows += [fake_row(num, options, costs) for num in options.fakes]
    of_calls = ", ".join(f"{name} {1e3 * cost:.2g} ms" for name, cost in costs.items())
    show(f"processor seconds per step; one call: {of_calls}", rows, as_json=options.json)


if __name__ == "__main__":
    main()
