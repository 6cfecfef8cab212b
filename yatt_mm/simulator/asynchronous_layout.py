"""The asynchronous layout: rollout, GenRM and training have separate devices and work all the time.

A group that is trained in step k was started with policy version k - staleness or newer. This limits the number of
groups in flight to the batches for which the current weights are new enough. A batch is closed only when the groups
that remain in flight will still be new enough for the next batch.
"""

from __future__ import annotations

from yatt_mm.batching.dynamic_sampling import Tail
from yatt_mm.simulator.cells import Cells, Use
from yatt_mm.simulator.config import SimulationConfig
from yatt_mm.simulator.events import Events
from yatt_mm.simulator.generation import GenerationPhase
from yatt_mm.simulator.results import LayoutResult, StepTimes
from yatt_mm.simulator.training import update_time
from yatt_mm.simulator.workload import Workload


def asynchronous(config: SimulationConfig, num_rollout: int, num_genrm: int) -> LayoutResult:
    """Simulate the asynchronous layout for all steps and return its result. Training gets the cells that rollout and
    GenRM do not use."""
    factor = max(config.sampling.max_prompts_factor, 2.0 + config.asynchronous.staleness)
    sampling = config.sampling.model_copy(update={"tail": Tail.CONTINUE, "max_prompts_factor": factor})
    run = _AsyncRun(config.model_copy(update={"sampling": sampling}), num_rollout, num_genrm)
    return run.result()


class _AsyncRun:
    def __init__(self, config: SimulationConfig, num_rollout: int, num_genrm: int) -> None:
        self.config = config
        self.events = Events()
        self.cells = Cells(config.num_cells)
        self.workload = Workload(config)
        self.generation = GenerationPhase(config, self.workload, self.events)
        self._num_rollout, self._num_genrm = num_rollout, num_genrm
        self._train_cells = range(num_rollout + num_genrm, config.num_cells)
        self._is_training = False
        self._train_ends_s: list[float] = []
        self._closed: list[tuple[float, float, int, int]] = []
        self._trained: list[tuple[float, float]] = []

    def result(self) -> LayoutResult:
        """Run all steps and return the layout's result. The first step is left out, because the pipeline is still
        filling."""
        generation, events, config = self.generation, self.events, self.config
        for cell in range(self._num_rollout + self._num_genrm):
            is_rollout = cell < self._num_rollout
            self.cells.put(cell, Use.ROLLOUT if is_rollout else Use.GENRM, 0.0)
            (generation.rollout if is_rollout else generation.genrm).wake(cell)
        staleness = config.asynchronous.staleness
        for step in range(config.run.steps):
            events.run(lambda step=step: generation.version >= step - staleness)  # type: ignore[misc]
            self._fill(step)
        events.run(lambda: generation.version == config.run.steps)
        self.cells.close(events.now_s)
        rollout, genrm = generation.rollout.times(), generation.genrm.times()
        training_s = len(self._train_cells) * sum(seconds for seconds, _ in self._trained)
        per_cell = config.devices.per_cell
        return LayoutResult(
            name="async",
            split=f"{self._num_rollout * per_cell} rollout + {self._num_genrm * per_cell} GenRM + "
            f"{len(self._train_cells) * per_cell} training, staleness {staleness}",
            steps=self._steps(),
            busy_frac=(rollout.active_s + genrm.active_s + training_s) / (config.num_cells * events.now_s),
            num_moves=0,
            decisions=(),
            spans=tuple(self.cells.spans),
        )

    def _steps(self) -> tuple[StepTimes, ...]:
        steps = []
        for k, (rollout_s, _, num_prompts, num_groups) in enumerate(self._closed):
            before_s = self._train_ends_s[k - 1] if k else 0.0
            train_s, imbalance = self._trained[k]
            steps.append(
                StepTimes(
                    step_s=self._train_ends_s[k] - before_s,
                    rollout_s=rollout_s,
                    train_s=train_s,
                    num_prompts_used=num_prompts,
                    num_groups=num_groups,
                    imbalance=imbalance,
                )
            )
        return tuple(steps[1:] or steps)

    def _fill(self, step: int) -> None:
        """Generate the batch of a step and plan its update on the training cells."""
        generation, events = self.generation, self.events
        start_s = events.now_s
        staleness = self.config.asynchronous.staleness
        oldest_allowed = step + 1 - staleness
        generation.begin(over_dispatch=max(1.0, generation.version + staleness - step + 1))
        events.run(lambda: generation.is_done and generation.oldest_version >= min(oldest_allowed, generation.version))
        outcome = generation.end()
        positions = (*outcome.accepted, *outcome.fillers)
        self._closed.append((events.now_s - start_s, events.now_s, outcome.num_prompts_used, len(positions)))
        prompts = [self.workload.prompt(position) for position in positions]
        num_devices = len(self._train_cells) * self.config.devices.per_cell
        update = update_time(self.config, prompts, num_devices)
        self._trained.append((update.seconds, update.imbalance))
        before_s = self._train_ends_s[-1] if self._train_ends_s else 0.0
        begin_s = max(events.now_s, before_s)
        self._train_ends_s.append(begin_s + update.seconds)
        events.plan(begin_s, self._begin_training)
        events.plan(begin_s + update.seconds, self._end_training)

    def _begin_training(self) -> None:
        for cell in self._train_cells:
            self.cells.put(cell, Use.TRAIN, self.events.now_s)

    def _end_training(self) -> None:
        """End an update: free the training cells, pause the rollout engines while they load the new weights, and
        increase the policy version."""
        for cell in self._train_cells:
            self.cells.put(cell, Use.IDLE, self.events.now_s)
        self.generation.rollout.pause(self.config.publish_s.value)
        self.generation.version += 1
