"""The launcher: it starts the processes of a run, watches them, and stops exactly what it started.

The order is: data-plane node, Ray, engines and training ranks (together), controllers. Each is put on one exit stack as
soon as it exists, so errors and Ctrl-C end everything in reverse order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from dataplane.client.client import Client
from dataplane.core.errors import DatasetError
from dataplane.core.refs import Dataset
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.batching.step_batches import StepBatches
from yatt_mm.common.checkpoints import find_checkpoint, read_state
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.common.ray_calls import fetch, wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.generation.prompts import bad_media_error
from yatt_mm.preflight.first_sample import check_first_sample
from yatt_mm.preflight.run_checks import check_run
from yatt_mm.protocol.control import RunStart
from yatt_mm.runtime import run_dir
from yatt_mm.runtime.cluster import ray_session
from yatt_mm.runtime.report import METRICS_FILE, Reporter
from yatt_mm.runtime.run_node import RunNode, start_node
from yatt_mm.runtime.signals import interrupt_on_signals, say_on_signals, signals_held, signals_restored
from yatt_mm.runtime.team import build_team, start_controllers

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.2
RECORDS_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """The folders of a run that are removed when it ends."""

    files: Path
    """Logs, sockets, temporary files."""
    weights: Path
    """Published weights, in shared memory."""


def launch(config: Config, *, resume: str | None = None, console: Console | None = None) -> dict[int, float]:
    """Run `config` to its end; return the held-out accuracy by step.

    Raises:
        ConfigError: before anything heavy is started.
        YattError: when a part of the run failed, or nothing could be learned; everything has been stopped by then.
    """
    console = console or Console()
    check_run(config)
    checkpoint = find_checkpoint(config.run_dir, resume) if resume else None
    state = read_state(checkpoint) if checkpoint else None
    started = time.perf_counter()
    with signals_restored(), ExitStack() as stack:
        interrupt_on_signals()
        try:
            reporter = _run(stack, config, checkpoint, state, console)
        finally:
            say_on_signals(console)
    _summarise(config, reporter, time.perf_counter() - started, console)
    reporter.learning.finish()
    return reporter.accuracies


def _run(
    stack: ExitStack, config: Config, checkpoint: Path | None, state: dict[str, Any] | None, console: Console
) -> Reporter:
    """Start everything on `stack`, watch the run to its end, and return its reporter."""
    started = time.perf_counter()
    stack.enter_context(run_dir.locked(config))
    scratch = stack.enter_context(_scratch())
    run_id = f"{config.run.name}-{secrets.token_hex(4)}"
    node = start_node(stack, config, run_id, scratch=scratch.files, console=console)
    start, batches = _start_point(config, node.uri, checkpoint, state)
    run_dir.prepare(config, checkpoint, start.step, console)
    console.print(_plan_of(config, start), highlight=False, soft_wrap=True)
    session = ray_session(
        config.ray.address,
        num_cpus=max(config.placement.num_devices, os.cpu_count() or 1),
        scratch=scratch.files,
        log_dir=config.run_dir / "logs",
        env=_env(scratch),
    )
    with signals_held():
        stack.enter_context(session)
    interrupt_on_signals()  # Ray has installed its own signal handler
    with console.status("starting engines and training ranks"):
        team = build_team(stack, config, run_id=run_id, node=node, batches=batches, weights_dir=scratch.weights)
    console.print(f"ready after {time.perf_counter() - started:.1f} s", highlight=False, soft_wrap=True)
    controllers = start_controllers(stack, config, team, start)
    reporter = stack.enter_context(
        Reporter(
            config.run_dir,
            num_steps=config.train.steps,
            first_step=start.step,
            judges=tuple(config.reward.judges),
            console=console,
        )
    )
    _watch(team.rendezvous, controllers, reporter, node)
    return reporter


def _watch(rendezvous: Any, controllers: list[Any], reporter: Reporter, node: RunNode) -> None:
    """Show records until every controller is finished. The first failure ends the run."""
    runs = {controller.run.remote(): f"controller {c}" for c, controller in enumerate(controllers)}
    left = list(runs)
    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=0)
        _take_records(rendezvous, reporter, node, wait_s=0.0 if done else POLL_S)
        for run in done:
            fetch(run, name=runs[run], what="the run")
        node.check()
    _take_records(rendezvous, reporter, node, wait_s=0.0)


def _take_records(rendezvous: Any, reporter: Reporter, node: RunNode, *, wait_s: float) -> None:
    call = ("the rendezvous", rendezvous.take_records.remote(wait_s))
    for record in wait_all([call], what="handing over records", deadline_s=RECORDS_DEADLINE_S)[0]:
        if record["kind"] == "step":
            record["dataplane/num_restarts"] = node.num_restarts
        reporter.take(record)


def _ingest(client: Client, key: str, name: str) -> Dataset:
    try:
        return client.ingest(name)
    except DatasetError as error:
        raise ConfigError(f"{key}: {error}") from error


def _start_point(
    config: Config, uri: str, checkpoint: Path | None, state: dict[str, Any] | None
) -> tuple[RunStart, StepBatches]:
    embedded = config.dataplane.uri is None
    train_set, eval_set = ("train", "eval") if embedded else (config.data.train, config.data.eval)
    with contextlib.closing(Client(uri, timeout_s=config.dataplane.timeout_s)) as client:
        sets = [_ingest(client, "data.train", train_set), _ingest(client, "data.eval", eval_set)]
        for key, name in (("data.train", train_set), ("data.eval", eval_set)):
            check_first_sample(client, config, key, name)
    num_train, num_eval = (dataset.num_samples for dataset in sets)
    flaws = [{"shard": bad.shard, "key": bad.key, "reason": bad.reason} for dataset in sets for bad in dataset.bad]
    if flaws and config.data.on_bad_media == "fail":
        raise bad_media_error(**flaws[0])
    if config.data.num_eval_samples:
        num_eval = min(num_eval, config.data.num_eval_samples)
    rule = config.sampling_rule()
    batches = StepBatches(
        rule, PromptOrder(num_samples=num_train, seed=config.run.seed), in_turns=config.judges_in_turn
    )
    if state is not None:
        batches = StepBatches.from_state(rule, state, in_turns=config.judges_in_turn)
        if batches.order.num_samples != num_train:
            raise ConfigError(
                f"--resume: the checkpoint was made with {batches.order.num_samples} training samples, data.train has "
                f"{num_train}; use the same data"
            )
    start = RunStart(
        step=state["step"] if state else 0,
        checkpoint=str(checkpoint.absolute()) if checkpoint else None,
        train_set=train_set,
        eval_set=eval_set,
        num_train=num_train,
        num_eval=num_eval,
        flaws=tuple(flaws),
    )
    return start, batches


@contextmanager
def _scratch() -> Iterator[Scratch]:
    with owned_folder(Path(tempfile.gettempdir()), "yatt-") as files:
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else files
        with owned_folder(parent, "yatt-weights-") as weights:
            yield Scratch(files=files, weights=weights)


def _env(scratch: Scratch) -> dict[str, str]:
    """Return the environment of every worker process."""
    return {
        "TMPDIR": str(scratch.files),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "JOBLIB_MULTIPROCESSING": "0",  # transformers imports joblib, whose semaphore would survive the process
    }


def _plan_of(config: Config, start: RunStart) -> str:
    parallel = config.parallel()
    pools = {"vLLM engines": config.engines} | {f"of judge {name}": judge for name, judge in config.judges.items()}
    engines = ", ".join(f"{pool.num} {name}{f' (tp {pool.tp})' if pool.tp > 1 else ''}" for name, pool in pools.items())
    return (
        f"[bold]{config.run.name}[/]: {config.model.path}; {start.num_train} training and {start.num_eval} held-out "
        f"samples\n  {config.controllers.num} controllers, {config.placement.num_devices} devices, "
        f"{config.placement.mode}: {engines} and {parallel.world_size} Megatron ranks "
        f"(tp {parallel.tp}, pp {parallel.pp}, cp {parallel.cp}, dp {parallel.dp})\n"
        f"  steps {start.step + 1} to {config.train.steps}, {config.train.prompts_per_step} prompts x "
        f"{config.rollout.group_size} samples each"
    )


def _summarise(config: Config, reporter: Reporter, seconds: float, console: Console) -> None:
    first, last = min(reporter.accuracies, default=None), max(reporter.accuracies, default=None)
    if first is not None and last is not None:
        console.print(
            f"held-out accuracy: {reporter.accuracies[first]:.3f} at step {first}, "
            f"{reporter.accuracies[last]:.3f} at step {last}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(
        f"done in {seconds:.0f} s; model in {config.run_dir / 'hf'}, metrics in {config.run_dir / METRICS_FILE} "
        f"(tensorboard --logdir {config.run_dir})",
        highlight=False,
        soft_wrap=True,
    )
