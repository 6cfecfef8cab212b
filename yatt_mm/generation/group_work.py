"""A group on its way through the stages of a generation phase, and the context that all stages share."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from dataplane.client.client import Client
from yatt_mm.config.run_config import Config
from yatt_mm.generation.pending_calls import PendingCalls
from yatt_mm.placement.engine_pool import Ended
from yatt_mm.protocol.control import Prompt, ScoredGroup, Team
from yatt_mm.protocol.rollout import GroupRef

CHUNK_SIZE = 8
"""The number of groups per call where no caller waits for single groups."""


@dataclass(slots=True, kw_only=True)
class GroupWork:
    """One group on its way through the stages of a generation phase."""

    prompt: Prompt
    group: GroupRef | None = None
    """The record of the responses so far; None before the first are sampled."""
    num_parts: int = 0
    """The number of attempts that sampled its responses: the first one and each continuation."""
    rewards: list[float] = field(default_factory=list)
    """[G] the rewards so far."""
    num_errors: int = 0
    scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """[judge][G] the scores so far."""

    @property
    def is_answered(self) -> bool:
        """True when no response was cut off."""
        return self.group is not None and "abort" not in self.group.finish_reasons

    def scored(self) -> ScoredGroup:
        """Return the group with its rewards, when it has them."""
        assert self.group is not None
        return ScoredGroup(
            prompt=self.prompt, group=self.group, rewards=tuple(self.rewards), num_errors=self.num_errors
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseContext:
    """What all stages of one phase of one controller share."""

    controller: int
    config: Config
    team: Team
    client: Client
    pending: PendingCalls
    name: str
    """The name of the phase, in errors and in the names of objects; unique in a run."""
    number: int
    """The coordinator's number of the phase."""
    awake: Mapping[str, tuple[int, ...]]
    """[pool] the numbers of the engines that were awake when the phase began."""

    @property
    def is_deterministic(self) -> bool:
        """True if every engine gets all controllers' requests of a phase as one batch."""
        return self.config.rollout.deterministic

    def shares(self, pool: str, works: Iterable[GroupWork]) -> dict[int, list[GroupWork]]:
        """Return for each engine its groups in a deterministic phase, by the run's order alone. Every engine has an
        entry."""
        engines = self.awake[pool]
        shares: dict[int, list[GroupWork]] = {engine: [] for engine in engines}
        for work in works:
            shares[engines[work.prompt.slot.position % len(engines)]].append(work)
        return shares


class EngineQueue:
    """This controller's requests that wait for an engine of one pool."""

    def __init__(
        self, context: PhaseContext, pool: str, send: Callable[[int, list[GroupWork]], None], *, chunk_size: int
    ) -> None:
        """`send` gives an engine up to `chunk_size` requests."""
        self._context = context
        self._pool = pool
        self._send = send
        self._chunk_size = chunk_size
        self._waiting: deque[GroupWork] = deque()
        self._ended: list[Ended] = []
        """Ended requests of which the coordinator does not know yet."""
        self._is_asking = False

    def add(self, works: Iterable[GroupWork]) -> None:
        """Add requests that need an engine."""
        self._waiting.extend(works)
        self._context.pending.soon(self._tell)

    def clear(self) -> None:
        """Drop the waiting requests."""
        self._waiting.clear()
        self._context.pending.soon(self._tell)

    def finish(self, engine: int, count: int, *, num_ended: int) -> None:
        """Note that an engine has given back `count` requests: `num_ended` are finished and the others were cut off."""
        self._ended.append((engine, count, num_ended))
        self._context.pending.soon(self._tell)

    def _tell(self) -> None:
        """Tell the coordinator in one call what waits and what has ended, and ask for engines if no such call is
        open."""
        context = self._context
        ended, self._ended = self._ended, []
        news = (context.number, self._pool, context.controller, len(self._waiting), ended)
        if self._waiting and not self._is_asking:
            self._is_asking = True
            call = context.team.coordinator.acquire.remote(*news)
            context.pending.then(call, self._granted, name="the coordinator", what=f"an engine of {self._pool}")
        elif ended or self._is_asking:
            context.team.coordinator.want.remote(*news)

    def _granted(self, engines: list[int]) -> None:
        self._is_asking = False
        for engine in sorted(set(engines)):
            works = [self._waiting.popleft() for _ in range(min(engines.count(engine), len(self._waiting)))]
            if len(works) < engines.count(engine):
                self.finish(engine, engines.count(engine) - len(works), num_ended=0)
            for begin in range(0, len(works), self._chunk_size):
                self._send(engine, works[begin : begin + self._chunk_size])
        self._context.pending.soon(self._tell)


def prompt_seed(run_seed: int, prompt: Prompt, *, purpose: str = "") -> int:
    """Return 31 bits that depend on the run's seed, the prompt's place in the run, and the purpose."""
    text = f"{run_seed} {prompt.slot.epoch} {prompt.slot.index} {purpose}".strip()
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") & 0x7FFFFFFF
