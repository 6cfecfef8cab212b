"""Starts what a run needs on its other hosts, after it has looked whether they have what the run needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import ray

from yatt_mm.common.errors import WorkerError
from yatt_mm.common.ray_calls import wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.hosts.agent import HostAgent, interface_of
from yatt_mm.hosts.devices import Devices, RayNode, own_node, reserved_devices
from yatt_mm.hosts.host_needs import HostNeeds, versions
from yatt_mm.hosts.orders import HostOrder, HostReady, NodeSettings
from yatt_mm.hosts.own_host import OwnHost, SharedFolder
from yatt_mm.hosts.run_hosts import RunHost, RunHosts

CHECK_S = 120.0
"""The seconds in which a host must reply while it is looked at, or made ready."""
STOP_S = 30.0
"""The seconds that other hosts have to remove what the run has there."""


def devices_of(config: Config) -> AbstractContextManager[Devices]:
    """Reserve the devices of a run for a `with` block. Raises WorkerError if Ray does not have them in time."""
    section = config.placement
    return reserved_devices(section.num_devices, section.num_hosts, deadline_s=config.controllers.deadline_s)


def start_hosts(
    stack: ExitStack,
    config: Config,
    own_host: OwnHost,
    devices: Devices,
    rewards: Sequence[str],
    tell: Callable[[str], None],
) -> RunHosts:
    """Make ready what a run needs on the hosts of its devices; `stack` ends it. `rewards`: the paths of the reward
    functions. `tell` gets a line about the hosts if there are several.

    Raises:
        WorkerError: a host lacks something, or cannot reach another one; it names all hosts and what they lack.
    """
    node, scratch, settings, own = own_host.node, own_host.scratch, own_host.settings, own_node()
    if own_host.shared is None or settings is None:
        node_id = "" if settings is None else settings.node_id
        host = RunHost(node=own, node_id=node_id, uri=node.uri, interface="", agent=None)
        return RunHosts(host, [host], devices, scratch=scratch.files)
    others = {there.id: there for there in devices.nodes if there.id != own.id}
    nodes = {own.id: settings} | {
        there.id: settings.on(number, there.address) for number, there in enumerate(others.values(), 1)
    }
    every, agents = [own, *others.values()], {}
    for number, there in enumerate(every):
        order = HostOrder(
            number=number,
            scratch=scratch,
            node=nodes[there.id],
            scope=node.scope,
            log_dir=config.log_dir.absolute(),
        )
        agents[there.id] = _agent(stack, there, order)
    by_name = {f"host {there}": agents[there.id] for there in every}
    named = {f"host {there}": agents[there.id] for there in others.values()}
    _refuse(_ask(named, "look", _needs(config, settings, own_host.shared, rewards)))
    stack.callback(_stop, named)
    ready: dict[str, HostReady] = dict(zip(others, _ask(named, "start").values(), strict=True))
    own_ready = HostReady(uri=node.uri, interface=interface_of(own.address))
    hosts = {
        there.id: RunHost(
            node=there,
            node_id=nodes[there.id].node_id,
            uri=(one := ready.get(there.id, own_ready)).uri,
            interface=one.interface,
            agent=agents[there.id],
        )
        for there in every
    }
    addresses = {f"host {there}": there.address for there in every}
    _check_links(addresses, by_name)
    _ask(by_name, "count_sent", list(addresses.values()))
    tell(f"hosts {', '.join(map(str, devices.nodes))}; what they send to each other is not encrypted")
    return RunHosts(hosts[own.id], [hosts[there.id] for there in devices.nodes], devices, scratch=scratch.files)


def _agent(stack: ExitStack, there: RayNode, order: HostOrder) -> Any:
    """Return the agent of a host, which ends with `stack`. Its temporary folder is not that of the run, which it makes
    first."""
    remote: Any = ray.remote(HostAgent)
    handle = remote.options(
        num_cpus=0,
        max_concurrency=16,
        enable_task_events=False,
        runtime_env={"env_vars": {"TMPDIR": str(order.scratch.files.parent)}},
        **there.placed(),
    ).remote(order=order, address=there.address)
    stack.callback(ray.kill, handle)
    return handle


def _ask(agents: Mapping[str, Any], method: str, *arguments: Any) -> dict[str, Any]:
    """Return what the agents reply, by the names of their hosts."""
    calls = [(name, getattr(agent, method).remote(*arguments)) for name, agent in agents.items()]
    return dict(zip(agents, wait_all(calls, what=f"{method} of the run", deadline_s=CHECK_S), strict=True))


def _needs(config: Config, settings: NodeSettings, shared: SharedFolder, rewards: Sequence[str]) -> HostNeeds:
    folders = {"model.path": config.model.path}
    folders |= {"reference.path": config.reference.path} if config.reference.path else {}
    folders |= {"critic.path": config.critic_path} if config.critic_path else {}
    judges = config.reward.judges.items()
    folders |= {f"reward.judges.{name}.model": judge.model for name, judge in judges if judge.url is None}
    return HostNeeds(
        versions=versions(),
        shared=shared.seen,
        shared_text=shared.text,
        folders={key: str(Path(folder).absolute()) for key, folder in folders.items()},
        sets=settings.roots,
        rewards=rewards,
    ).with_marks()


def _refuse(lacking: Mapping[str, Sequence[str]]) -> None:
    """Raise WorkerError if a host lacks something."""
    if found := [f"{name}: {what}" for name, every in lacking.items() for what in every]:
        raise WorkerError("not all hosts can take part: " + "; ".join(found))


def _check_links(addresses: Mapping[str, str], agents: Mapping[str, Any]) -> None:
    """Check that every host reaches every other one, at a port that a process there has just opened, as the training
    ranks do. `addresses`: by the names of the hosts."""
    ports = _ask(agents, "listen")
    ends = {name: (address, ports[name]) for name, address in addresses.items()}
    calls = [
        (name, agent.reach.remote({end: at for end, at in ends.items() if end != name}))
        for name, agent in agents.items()
    ]
    replies = wait_all(calls, what="reaching the other hosts", deadline_s=CHECK_S)
    _ask(agents, "stop_listening")
    _refuse(
        {
            name: [f"it cannot reach {what}: open the ports between them" for what in found]
            for name, found in zip(agents, replies, strict=True)
        }
    )


def _stop(agents: Mapping[str, Any]) -> None:
    """Let all other hosts remove what the run has there. What is gone already is left out."""
    calls = [agent.stop.remote() for agent in agents.values()]
    done, late = ray.wait(calls, num_returns=len(calls), timeout=STOP_S) if calls else ([], [])
    problems = [f"{name} did not end in {STOP_S:g} s" for name, call in zip(agents, calls) if call in late]
    for name, call in zip(agents, calls):
        if call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayTaskError as error:
                problems.append(f"{name}: {error.cause}")
            except ray.exceptions.RayError:
                continue  # it is gone, and its process has ended what there was
    if problems:
        raise WorkerError(f"something of the run may be left: {'; '.join(problems)}")
