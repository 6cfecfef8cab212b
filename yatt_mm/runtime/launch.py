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
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from dataplane.core.errors import DataPlaneError
from yatt_mm.common.checkpoints import Checkpoints, find_checkpoint, read_state
from yatt_mm.common.errors import YattError
from yatt_mm.common.log_file import logs_of
from yatt_mm.common.owned_dirs import owned_folder
from yatt_mm.common.ray_calls import fetch, own_words, wait_all
from yatt_mm.config.run_config import Config
from yatt_mm.preflight.hub import with_local_paths
from yatt_mm.preflight.run_checks import check_run
from yatt_mm.runtime import run_dir
from yatt_mm.runtime.cluster import asks_for_no_token, ray_session
from yatt_mm.runtime.ending import ending_with_the_first_error
from yatt_mm.runtime.report import METRICS_FILE, QUARANTINE_FILE, Reporter
from yatt_mm.runtime.run_node import RunNode, keep_log, start_node
from yatt_mm.runtime.signals import interrupt_on_signals, say_on_signals, signals_held, signals_restored
from yatt_mm.runtime.start_point import StartPoint, find_start
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


def evaluate(config: Config, *, console: Console | None = None) -> dict[str, float]:
    """Measure the model of `model.path` on the held-out sets of `config`, with engines alone; return the metrics.

    Raises:
        ConfigError: before anything heavy is started.
        YattError: when a part failed; everything has been stopped by then.
    """
    console = console or Console()
    folder = config.run_dir / "evaluations" / time.strftime("%Y%m%d-%H%M%S")
    config = with_local_paths(config.for_evaluation(folder), console)
    check_run(config)
    with run_dir.locked(config):
        reporter = _launched(config, None, None, console)
    metrics = {name: value for name, value in reporter.last.items() if name.startswith("eval/")}
    console.print(_table_of(metrics))
    _tell_left_out(config, reporter, console)
    console.print(f"metrics and responses in {folder}", highlight=False, soft_wrap=True)
    return metrics


def launch(config: Config, *, resume: str | None = None, console: Console | None = None) -> dict[int, float]:
    """Run `config` to its end; return the held-out accuracy by step.

    Raises:
        ConfigError: before anything heavy is started.
        YattError: when a part of the run failed, or nothing could be learned; everything has been stopped by then.
    """
    console = console or Console()
    config = with_local_paths(config, console)
    check_run(config)
    with run_dir.locked(config):  # no other run may commit or drop a checkpoint that is looked at here
        checkpoint = _find_checkpoint(config, resume, console) if resume else None
        state = read_state(checkpoint) if checkpoint else None
        if state is not None and state["step"] >= config.train.steps:
            console.print(
                f"{config.run_dir} is finished: {checkpoint} is of step {state['step']}, and train.steps is "
                f"{config.train.steps}; raise train.steps to go on",
                highlight=False,
                soft_wrap=True,
            )
            return {}
        started = time.perf_counter()
        reporter = _launched(config, checkpoint, state, console)
    _summarise(config, reporter, time.perf_counter() - started, console)
    reporter.learning.finish()
    return reporter.accuracies


def _find_checkpoint(config: Config, resume: str, console: Console) -> Path | None:
    def tell(line: str) -> None:
        console.print(escape(line), highlight=False, soft_wrap=True)

    with console.status("reading the checkpoint"):
        return find_checkpoint(config.run_dir, resume, tell)


def _launched(config: Config, checkpoint: Path | None, state: dict[str, Any] | None, console: Console) -> Reporter:
    """Run `config` to its end, and return what it reported."""
    with signals_restored(), ending_with_the_first_error() as stack:
        interrupt_on_signals(console)
        try:
            return _run(stack, config, checkpoint, state, console)
        except (YattError, DataPlaneError) as error:
            _note_logs(error, config.log_dir)
            raise
        except KeyboardInterrupt:
            if config.trains:
                stack.callback(_tell_what_is_saved, config, console)
            raise
        finally:
            say_on_signals(console)


def _run(
    stack: ExitStack, config: Config, checkpoint: Path | None, state: dict[str, Any] | None, console: Console
) -> Reporter:
    """Start everything on `stack`, watch the run to its end, and return its reporter."""
    started = time.perf_counter()
    scratch = stack.enter_context(_scratch())
    run_id = f"{config.run.name}-{secrets.token_hex(4)}"
    node = start_node(stack, config, run_id, scratch=scratch.files, console=console)
    point = find_start(config, node.uri, checkpoint, state)
    start = point.start
    run_dir.prepare(config, checkpoint, start.step, console)
    stack.callback(keep_log, scratch.files, config.log_dir)
    console.print(_plan_of(config, point), highlight=False, soft_wrap=True)
    for warning in point.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    session = ray_session(
        config.ray.address,
        num_cpus=max(config.placement.num_devices, os.cpu_count() or 1),
        scratch=scratch.files,
        env=_env(scratch),
    )
    with signals_held(console):
        stack.enter_context(session)
    if config.ray.address is not None and asks_for_no_token():
        warning = (
            f"the Ray cluster at {config.ray.address} asks for no token: any process that reaches it can run programs "
            "as its user; start it with RAY_AUTH_MODE=token, and set that and RAY_AUTH_TOKEN_PATH here"
        )
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
    judges = " and judges" if config.has_local_judges else ""
    starting = f"starting {config.engines.num} engines{judges}{' and training ranks' if config.trains else ''}"
    console.print(f"  {starting}", highlight=False)
    with console.status(starting):
        team = build_team(
            stack,
            config,
            run_id=run_id,
            node=node,
            start=start,
            batches=point.batches,
            weights_dir=scratch.weights,
            store=scratch.files / "ranks_store",
            tell=lambda line: console.print(f"  {line}", highlight=False, soft_wrap=True),
        )
    console.print(f"ready after {time.perf_counter() - started:.1f} s", highlight=False, soft_wrap=True)
    controllers = start_controllers(stack, config, team, start)
    reporter = stack.enter_context(
        Reporter(
            config.run_dir,
            num_steps=config.train.steps,
            first_step=start.step,
            judges=tuple(config.reward.judges),
            min_reward_range=config.algorithm.min_reward_range,
            console=console,
        )
    )
    _watch(team.rendezvous, controllers, reporter, node)
    return reporter


def _note_logs(error: Exception, folder: Path) -> None:
    """Add to an error where its whole text is, and the logs of those that it names."""
    if folder.is_dir():
        file = folder / "launcher.log"
        with contextlib.suppress(OSError), file.open("a") as log:  # the disk may be full
            log.write("".join(traceback.format_exception(error)))
        error.add_note("logs: " + ", ".join(map(str, [*logs_of(str(error), folder), file])))


def _tell_what_is_saved(config: Config, console: Console) -> None:
    """Say, after an interruption, where the run can go on."""
    steps = Checkpoints(root=config.run_dir / "checkpoints", keep=config.checkpoint.keep).steps()
    saved = f"--resume goes on after step {steps[-1]}" if steps else "no checkpoint was saved yet"
    console.print(f"{config.run_dir}: {saved}", highlight=False, soft_wrap=True)


def _watch(rendezvous: Any, controllers: list[Any], reporter: Reporter, node: RunNode) -> None:
    """Show records until every controller is finished. The first failure ends the run."""
    runs = {controller.run.remote(): f"controller {c}" for c, controller in enumerate(controllers)}
    left = list(runs)
    while left:
        done, left = ray.wait(left, num_returns=len(left), timeout=0)
        _take_records(rendezvous, reporter, node, wait_s=0.0 if done else POLL_S)
        for run in done:
            with own_words():
                fetch(run, name=runs[run], what="the run")
        node.check()
    _take_records(rendezvous, reporter, node, wait_s=0.0)


def _take_records(rendezvous: Any, reporter: Reporter, node: RunNode, *, wait_s: float) -> None:
    call = ("the rendezvous", rendezvous.take_records.remote(wait_s))
    for record in wait_all([call], what="handing over records", deadline_s=RECORDS_DEADLINE_S)[0]:
        if record["kind"] == "step":
            record["dataplane/num_restarts"] = node.num_restarts
        reporter.take(record)


@contextmanager
def _scratch() -> Iterator[Scratch]:
    with owned_folder(Path(tempfile.gettempdir()), "yatt-") as files:
        parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else files
        with owned_folder(parent, "yatt-weights-") as weights:
            yield Scratch(files=files, weights=weights)


CLIENT_VARIABLES = tuple(f"DATAPLANE_{name}" for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY"))
"""The variables of the environment that name the files with which a client enters a node."""


def _env(scratch: Scratch) -> dict[str, str]:
    """Return the environment of every worker process."""
    return {
        "TMPDIR": str(scratch.files),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "JOBLIB_MULTIPROCESSING": "0",  # transformers imports joblib, whose semaphore would survive the process
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    } | {name: str(Path(os.environ[name]).absolute()) for name in CLIENT_VARIABLES if os.environ.get(name)}


def _plan_of(config: Config, point: StartPoint) -> str:
    parallel, start = config.parallel(), point.start
    pools = {"vLLM engines": config.engines} | {f"of judge {name}": judge for name, judge in config.judges.items()}
    engines = ", ".join(f"{pool.num} {name}{f' (tp {pool.tp})' if pool.tp > 1 else ''}" for name, pool in pools.items())
    num_train, num_held_out = (sum(one.num_samples for one in sets) for sets in (start.train_sets, start.eval_sets))
    sets = "".join(f"  {escape(line)}\n" for line in point.sets)
    if not config.trains:
        return f"{config.model.path}: {num_held_out} held-out samples; {engines}\n{sets}".rstrip()
    return (
        f"[bold]{config.run.name}[/]: {config.model.path}; {num_train} training samples and {num_held_out} "
        f"held-out samples\n{sets}"
        f"  {config.controllers.num} controllers, {config.placement.num_devices} devices, "
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
    if reporter.last.get("best/step"):
        console.print(
            f"best {config.eval.keep_best}: {reporter.last['best/value']:.3f} at step "
            f"{reporter.last['best/step']:.0f}; model in {config.run_dir / run_dir.BEST_DIR}",
            highlight=False,
            soft_wrap=True,
        )
    elif config.eval.keep_best and "best/step" in reporter.last:
        console.print(
            f"best {config.eval.keep_best}: {reporter.last['best/value']:.3f} at step 0, before training; no model is "
            "kept for it",
            highlight=False,
            soft_wrap=True,
        )
    _tell_left_out(config, reporter, console)
    console.print(
        f"done in {seconds:.0f} s; model in {config.run_dir / 'hf'}, metrics in {config.run_dir / METRICS_FILE} "
        f"(tensorboard --logdir {config.run_dir})",
        highlight=False,
        soft_wrap=True,
    )


def _table_of(metrics: Mapping[str, float]) -> Table:
    """Return the metrics of an evaluation, one line each."""
    table = Table("metric", Column("value", justify="right"), box=box.SIMPLE)
    for name, value in metrics.items():
        table.add_row(escape(name), f"{value:.0f}" if name.rpartition("/")[2].startswith("num_") else f"{value:.4f}")
    return table


def _tell_left_out(config: Config, reporter: Reporter, console: Console) -> None:
    """Say how many samples were left out, and how many responses have no score."""
    if reporter.num_quarantined or reporter.num_filtered:
        by_filter = f", {reporter.num_filtered} of them by data.filter" if reporter.num_filtered else ""
        num = reporter.num_quarantined + reporter.num_filtered
        console.print(
            f"[yellow]{num} {'sample was' if num == 1 else 'samples were'} left out[/]{by_filter}; "
            f"{config.run_dir / QUARANTINE_FILE} says why",
            highlight=False,
            soft_wrap=True,
        )
    if reporter.num_without_score:
        console.print(
            f"[yellow]{reporter.num_without_score} scores could not be given[/] by the reward function and the judges; "
            "the lines with 'no score' say why",
            highlight=False,
            soft_wrap=True,
        )
