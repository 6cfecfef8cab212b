"""One generation phase for tests: the real rendezvous and coordinator, and fake workers that a test holds or lets go.

The whole runs in tests/yatt_mm/whole_runs have real workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from dataplane.core.refs import Ref
from tests.yatt_mm import runs
from tests.yatt_mm.batching.orders import order_of
from yatt_mm.batching.meeting import MeetingKey
from yatt_mm.batching.rendezvous import Rendezvous
from yatt_mm.batching.rendezvous_client import RendezvousClient
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.conversation import ask
from yatt_mm.common.held_memory import StateReport
from yatt_mm.common.host_progress import HostProgress
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.generation.phase_calls import open_calls
from yatt_mm.generation.phase_context import PhaseContext
from yatt_mm.placement.coordinator import Coordinator
from yatt_mm.placement.coordinator_client import CoordinatorClient
from yatt_mm.placement.state_changes import StateChanges
from yatt_mm.protocol.control import Prompt, Slot, Team
from yatt_mm.protocol.genrm import JudgedGroup, JudgeTask
from yatt_mm.protocol.placement_model import Phase, Role, State, Unit
from yatt_mm.protocol.rewards import GroupRewards, RewardTask
from yatt_mm.protocol.rollout import GroupRef, PromptTask, SamplingSettings

GROUP_SIZE = 2
DEADLINE_S = 20.0
SAMPLING = SamplingSettings(max_tokens=3)
JUDGE = (
    "reward.weight=0.5",
    "reward.judges.head.url=http://127.0.0.1:9/v1",
    "reward.judges.head.model=judge",
    "reward.judges.head.weight=2",
)


class Handle:
    """The handle of an actor: `handle.method.remote(...)` begins a call and returns an awaitable."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._body, name)

        class Remote:
            @staticmethod
            def remote(*arguments: Any) -> asyncio.Future[Any]:
                return asyncio.ensure_future(method(*arguments))

        return Remote


class Engine:
    """A fake engine of the policy. Groups in `held` stay until they are aborted or the engine sleeps."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.calls: list[list[int]] = []
        """[call] the positions of its groups."""
        self.parts: list[tuple[int, bool]] = []
        """[attempt] the position of the group, and True if it continues an earlier attempt."""
        self.aborted: list[str] = []
        self.failure: Exception | None = None
        self._cut: dict[str, asyncio.Event] = {}

    async def generate(self, tasks: list[PromptTask], sampling: SamplingSettings) -> list[GroupRef]:
        self.calls.append([task.slot for task in tasks])
        if self.failure is not None:
            raise self.failure
        return list(await asyncio.gather(*(self._sample(task) for task in tasks)))

    async def generate_together(
        self, phase: str, controller: int, tasks: list[PromptTask], sampling: SamplingSettings
    ) -> list[GroupRef]:
        return await self.generate(tasks, sampling)

    async def abort(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            self._cut[name].set()

    async def set_state(self, state: State) -> StateReport:
        if state is not State.AWAKE:
            self.held.clear()
            for event in self._cut.values():
                event.set()
        return StateReport(held_bytes=0)

    async def _sample(self, task: PromptTask) -> GroupRef:
        self.parts.append((task.slot, task.partial is not None))
        cut = self._cut[task.name] = asyncio.Event()
        if task.slot in self.held:
            await cut.wait()
        del self._cut[task.name]
        return group(task, "abort" if cut.is_set() else "stop")


class RewardWorker:
    """A fake reward worker: the first response of a group gets 1, the others 0. Groups in `plain` get 0 for all."""

    def __init__(self) -> None:
        self.plain: set[int] = set()
        self.calls: list[list[int]] = []
        self.deaths: list[Exception] = []
        """What the next calls raise, in order."""
        self.hangs: asyncio.Future[None] | None = None
        """What the next call waits for; None lets it reply at once."""
        self.absences: list[Exception] = []
        """What the next questions raise whether the worker is there, in order."""
        self.is_busy = False
        """True if it does not say that it is there."""

    async def ready(self) -> None:
        if self.is_busy:
            await asyncio.sleep(DEADLINE_S)
        if self.absences:
            raise self.absences.pop(0)

    async def score(self, tasks: list[RewardTask]) -> list[GroupRewards]:
        self.calls.append([task.group.slot for task in tasks])
        if self.deaths:
            raise self.deaths.pop(0)
        hangs, self.hangs = self.hangs, None
        if hangs is not None:
            await hangs
        rewards = [(0.0 if task.group.slot in self.plain else 1.0, 0.0) for task in tasks]
        return [GroupRewards(rewards=each, num_errors=0) for each in rewards]


class Judge:
    """A fake engine of a judge. The first `num_refused` groups come back without a verdict, as when it is asleep."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.calls: list[list[int]] = []

    async def judge(self, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        self.calls.append([task.group.slot for task in tasks])
        judged: list[JudgedGroup | None] = []
        for _ in tasks:
            self.num_refused -= 1
            verdicts = JudgedGroup(scores=(0.25, 0.5), num_retried=0, num_failed=0)
            judged.append(None if self.num_refused >= 0 else verdicts)
        return judged

    async def judge_together(self, phase: str, controller: int, tasks: list[JudgeTask]) -> list[JudgedGroup | None]:
        return await self.judge(tasks)

    async def set_state(self, state: State) -> StateReport:
        return StateReport(held_bytes=0)


class Rank:
    """A fake training rank."""

    async def set_state(self, state: State) -> StateReport:
        return StateReport(held_bytes=0)


@dataclass
class Records:
    """A fake data plane: it notes which records were released."""

    released: list[str] = field(default_factory=list)

    def release(self, refs: Sequence[Ref]) -> None:
        """Note the names."""
        self.released += [ref.name for ref in refs]


@dataclass(kw_only=True)
class World:
    """The actors of one phase, and the context of controller 0."""

    config: Config
    engines: list[Engine]
    reward_workers: list[RewardWorker]
    judges: list[Judge]
    records: Records
    rendezvous: Rendezvous
    coordinator: Coordinator
    context: PhaseContext
    num_engine_calls: dict[str, int] = field(default_factory=dict)

    def prompts(self, num: int) -> list[Prompt]:
        """Return prompts without media, from position 0."""
        return [prompt(Slot(position=at, epoch=0, index=at)) for at in range(num)]

    async def open_stream(self) -> list[Slot]:
        """Return the prompts with which controller 0 begins a stream."""
        return await self.rendezvous.open_stream(_key(), 0)


def config_of(*overrides: str) -> Config:
    """Return the config of a run with one controller and groups of two."""
    path, *rest = runs.arguments(runs.ROOT / "unused", runs.ROOT / "unused", "fakes")
    small = (f"rollout.group_size={GROUP_SIZE}", "rollout.deterministic=false", "controllers.num=1")
    return load_config(runs.ROOT / path, [*rest, *small, *overrides])


@asynccontextmanager
async def world(*overrides: str, num_workers: int = 1, deadline_s: float = DEADLINE_S) -> AsyncIterator[World]:
    """Run a rollout or generation phase with fake workers during a `with` block."""
    config = config_of(*overrides)
    placement, handles = config.make_placement(), {}
    engines = [Engine() for unit in placement.of_role(Role.ROLLOUT)]
    judges = [Judge() for unit in placement.of_role(Role.GENRM)]
    bodies: dict[Role, Sequence[Any]] = {Role.ROLLOUT: engines, Role.GENRM: judges}
    for role in Role:
        for unit, body in zip(placement.of_role(role), bodies.get(role) or [Rank() for _ in placement.units]):
            handles[unit] = Handle(body)
    states: dict[Unit, State] = dict.fromkeys(placement.units, State.ASLEEP)
    coordinator = Coordinator(
        placement=placement,
        changes=StateChanges(placement, handles, agents=(), deadline_s=DEADLINE_S),
        states=states,
        requests_per_engine=config.requests_per_engine(),
        num_controllers=1,
        division=config.division(),
    )
    batches = StepBatches(config.sampling_rule(), order_of(1000, seed=0))
    rendezvous = Rendezvous(num_controllers=1, deadline_s=DEADLINE_S, batches=batches)
    workers, records = [RewardWorker() for _ in range(num_workers)], Records()
    team = Team(
        rendezvous=Handle(rendezvous),
        coordinator=Handle(coordinator),
        engines=tuple(handles[unit] for unit in placement.of_role(Role.ROLLOUT)),
        reward_workers=tuple(Handle(worker) for worker in workers),
        judges={"head": tuple(handles[unit] for unit in placement.of_role(Role.GENRM))} if judges else {},
        placement=placement,
        run_id="test",
        progress=HostProgress(),
        nodes={},
        **cast(Any, dict.fromkeys(("ranks", "parallel", "operations", "dataplane_uri", "recipes", "weights_dir"))),
        **cast(Any, dict.fromkeys(("checkpoints", "export_dir", "best_dir", "restart_count", "keeper"))),
    )
    entered = await coordinator.enter(Phase.GENERATION if config.is_partial else Phase.ROLLOUT, 1, True)
    client = RendezvousClient(
        team.rendezvous, controller=0, restart_count=0, step=1, deadline_s=DEADLINE_S, progress=team.progress
    )
    async with open_calls(deadline_s=deadline_s, on_progress=client.seen) as calls:
        context = PhaseContext(
            controller=0,
            config=config,
            team=team,
            client=cast(Any, records),
            rendezvous=client,
            coordinator=CoordinatorClient(team.coordinator, controller=0, deadline_s=DEADLINE_S),
            calls=calls,
            name="step 1",
            number=entered.number,
            awake=entered.awake,
        )
        yield World(
            config=config,
            engines=engines,
            reward_workers=workers,
            judges=judges,
            records=records,
            rendezvous=rendezvous,
            coordinator=coordinator,
            context=context,
        )


def prompt(slot: Slot) -> Prompt:
    """Return a prompt without media."""
    return Prompt(slot=slot, conversation=ask("?"), question=ask("?"), answer="!", fields={}, reward="m:f", media=())


def group(task: PromptTask, reason: str) -> GroupRef:
    """Return the record of an attempt that ended with this finish reason."""
    ref = Ref(name=task.name, kind="plain", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=None)
    return GroupRef(
        slot=task.slot,
        ref=ref,
        media=(),
        num_prompt_tokens=1,
        lengths=(1,) * GROUP_SIZE,
        policy_versions=((0, 0),) * GROUP_SIZE,
        finish_reasons=(reason,) * GROUP_SIZE,
    )


async def until(condition: Any, deadline_s: float = DEADLINE_S) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():
            await asyncio.sleep(0.001)


def _key() -> MeetingKey:
    return MeetingKey(step=1, phase="rollout", restart_count=0, sequence=0)
