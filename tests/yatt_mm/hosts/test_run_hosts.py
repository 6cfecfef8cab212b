"""Tests of what the launcher hears of other hosts: connections that break, and hosts that are lost. Fakes replace
agents and Ray's calls; the runs in tests/hosts have real ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray

from yatt_mm.common.errors import RunLost
from yatt_mm.hosts import run_hosts
from yatt_mm.hosts.devices import RayNode
from yatt_mm.hosts.orders import NodeNews
from yatt_mm.hosts.run_hosts import RunHost, RunHosts

BROKEN = ray.exceptions.ActorUnavailableError("connection reset", b"0" * 16)
ALIVE = NodeNews()
DIED = ray.exceptions.ActorDiedError()


class Agent:
    """A fake agent that gives one reply after the other, the last one again and again."""

    def __init__(self, *replies: NodeNews | Exception | None) -> None:
        """None: no reply in time."""
        self.replies = list(replies)
        self.news = self

    def remote(self) -> Any:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return lambda: reply


def get(call: Callable[[], Any]) -> Any:
    reply = call()
    if isinstance(reply, Exception):
        raise reply
    return reply


def wait(calls: Sequence[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
    return [call for call in calls if call() is not None], [call for call in calls if call() is None]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunHosts]:
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(run_hosts, "AGAIN_S", 0.01)

    def hosts(*replies: NodeNews | Exception | None, own: NodeNews | Exception = ALIVE) -> RunHosts:
        here, there = (
            RunHost(
                node=RayNode(id=name, address=f"10.0.0.{number}", hostname=name),
                node_id=name,
                uri="",
                interface="eth0",
                agent=agent,
            )
            for number, (name, agent) in enumerate((("here", Agent(own)), ("there", Agent(*replies))))
        )
        return RunHosts(here, [here, there], None, scratch=Path())  # type: ignore[arg-type]

    return hosts


def test_a_host_whose_connection_breaks_is_asked_again_until_it_replies(make: Callable[..., RunHosts]) -> None:
    hosts = make(BROKEN, BROKEN, NodeNews(num_restarts=2))
    hosts.require(deadline_s=5.0)
    assert hosts.num_restarts == 2


@pytest.mark.parametrize("reply", [BROKEN, None])
def test_a_host_that_does_not_reply_in_time_is_lost(make: Callable[..., RunHosts], reply: Exception | None) -> None:
    with pytest.raises(RunLost, match=r"host there \(10\.0\.0\.1\) is lost: its agent did not reply in 0\.1 s"):
        make(reply).require(deadline_s=0.1)


def test_a_host_whose_agent_has_died_is_lost_at_once(make: Callable[..., RunHosts]) -> None:
    for ask in (lambda hosts: hosts.require(deadline_s=60.0), RunHosts.check):
        with pytest.raises(RunLost, match=r"host there .* is lost: its agent was lost during the run: "):
            ask(make(DIED))


def test_the_agent_of_the_launchers_host_is_looked_at_too(make: Callable[..., RunHosts]) -> None:
    for ask in (lambda hosts: hosts.require(deadline_s=60.0), RunHosts.check):
        with pytest.raises(RunLost, match=r"host here .* is lost: its agent was lost during the run: "):
            ask(make(ALIVE, own=DIED))


def test_a_broken_connection_is_no_loss_while_a_run_is_watched(make: Callable[..., RunHosts]) -> None:
    hosts = make(BROKEN)
    hosts.check()
    hosts.check()
