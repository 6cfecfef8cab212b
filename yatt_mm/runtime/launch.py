"""The launcher: it starts the processes of a run, watches them, and stops exactly what it started.

The order is: data-plane node, Ray, engines and training ranks (together), controllers. Each is put on one exit stack as
soon as it exists, so errors and Ctrl-C end everything in reverse order.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape

from dataplane.core.errors import DataPlaneError
from yatt_mm.common.begun_steps import BegunStep
from yatt_mm.common.checkpoints import Checkpoints, find_checkpoint, read_state
from yatt_mm.common.errors import RunGrows, RunLost, RunStopped, WorkerError, YattError
from yatt_mm.common.log_file import logs_of
from yatt_mm.config.run_config import Config
from yatt_mm.hosts.devices import own_node
from yatt_mm.hosts.host_count import fitting_hosts, missing_hosts
from yatt_mm.hosts.own_host import OwnHost, shared_folder
from yatt_mm.hosts.run_node import (
    INSECURE_VARIABLE,
    LOOPBACK,
    SPILL_PREFIX,
    keep_log,
    node_settings,
    node_token,
    start_node,
)
from yatt_mm.hosts.scratch import Scratch, scratch_folders
from yatt_mm.hosts.start_hosts import devices_of, start_hosts
from yatt_mm.preflight.hub import with_local_paths
from yatt_mm.preflight.judge_servers import check_judge_servers
from yatt_mm.preflight.run_checks import check_run
from yatt_mm.reporting.report import Reporter
from yatt_mm.runtime import run_dir
from yatt_mm.runtime.begun_start import find_begun
from yatt_mm.runtime.checkpoint_copies import CheckpointCopies
from yatt_mm.runtime.cluster import asks_for_no_token, ray_session
from yatt_mm.runtime.crew import Crew
from yatt_mm.runtime.ending import ending_with_the_first_error
from yatt_mm.runtime.judge_keys import keys_in_files
from yatt_mm.runtime.repairs import Repairs
from yatt_mm.runtime.signals import interrupt_on_signals, say_on_signals, signals_held, signals_restored
from yatt_mm.runtime.start_point import find_start
from yatt_mm.runtime.stopping import Stopping
from yatt_mm.runtime.summary import plan_of, summarise, table_of, tell_left_out, tell_what_is_saved
from yatt_mm.runtime.supervised import LIFELINE
from yatt_mm.runtime.watch import Watch


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
        reporter = _launched(config, None, None, console, Stopping(None))
    metrics = {name: value for name, value in reporter.last.items() if name.startswith("eval/")}
    console.print(table_of(metrics))
    tell_left_out(config, reporter, console)
    console.print(f"metrics and responses in {folder}", highlight=False, soft_wrap=True)
    return metrics


def launch(config: Config, *, resume: str | None = None, console: Console | None = None) -> dict[int, float]:
    """Run `config` to its end; return the held-out accuracy by step.

    Raises:
        ConfigError: before anything heavy is started.
        RunStopped: when it was told to stop by a signal or by `train.max_time`, and its state is saved.
        YattError: when a part of the run failed, or nothing could be learned; everything has been stopped by then.
    """
    console = console or Console()
    before_s = 0.0 if LIFELINE.loss is None else time.time() - LIFELINE.started_s
    stopping = Stopping(config.train.max_time, before_s=before_s)
    config = with_local_paths(config, console)
    check_run(config)
    with run_dir.locked(config):  # no other run may commit or drop a checkpoint that is looked at here
        checkpoint, begun = _find_checkpoint(config, resume, console) if resume else (None, {})
        state = read_state(checkpoint) if checkpoint else None
        has_model = (config.run_dir / run_dir.EXPORT_DIR).is_dir() and LIFELINE.loss is None
        if state is not None and state["step"] >= config.train.steps and has_model:
            console.print(
                f"{config.run_dir} is finished: {checkpoint} is of step {state['step']}, and train.steps is "
                f"{config.train.steps}; raise train.steps to go on",
                highlight=False,
                soft_wrap=True,
            )
            return {}
        reporter = _launched(config, checkpoint, state, console, stopping, begun)
    summarise(config, reporter, stopping.seconds, console)
    reporter.learning.finish()
    return reporter.accuracies


def _find_checkpoint(config: Config, resume: str, console: Console) -> tuple[Path | None, dict[int, BegunStep]]:
    """Return the checkpoint from which the run goes on, and the steps that were begun after it."""

    def tell(line: str) -> None:
        console.print(escape(line), highlight=False, soft_wrap=True)

    with console.status("reading the checkpoint"):
        checkpoint = find_checkpoint(config.run_dir, resume, tell)
        return checkpoint, find_begun(config, checkpoint, resume, tell) if checkpoint is not None else {}


def _launched(
    config: Config,
    checkpoint: Path | None,
    state: dict[str, Any] | None,
    console: Console,
    stopping: Stopping,
    begun: Mapping[int, BegunStep] = MappingProxyType({}),
) -> Reporter:
    """Run `config` to its end, and return what it reported."""
    with signals_restored(), ending_with_the_first_error() as stack:
        interrupt_on_signals(console)
        try:
            return _run(stack, config, checkpoint, state, console, stopping, begun)
        except RunStopped:
            raise
        except (YattError, DataPlaneError) as error:
            _note_logs(error, config.log_dir)
            raise
        except KeyboardInterrupt:
            if config.trains:
                stack.callback(tell_what_is_saved, config, console)
            raise
        finally:
            say_on_signals(console)


def _run(
    stack: ExitStack,
    config: Config,
    checkpoint: Path | None,
    state: dict[str, Any] | None,
    console: Console,
    stopping: Stopping,
    begun: Mapping[int, BegunStep],
) -> Reporter:
    """Start everything on `stack`, watch the run to its end, and return its reporter. Raises RunStopped if the end came
    before the last step."""
    started = time.perf_counter()
    if servers := [name for name, judge in config.reward.judges.items() if judge.url is not None]:
        with console.status(f"asking the server of {' and '.join(servers)}"):
            check_judge_servers(config)
    scratch = stack.enter_context(scratch_folders())
    stack.enter_context(keys_in_files(config.reward.judges, scratch.files))
    run_id = f"{config.run.name}-{secrets.token_hex(4)}"
    wanted, has_hosts = config, config.placement.num_hosts > 1

    def tell(line: str) -> None:
        console.print(f"  {line}", highlight=False, soft_wrap=True)

    config, own_host = _start_own_host(stack, config, run_id, scratch, console, tell)
    node = own_host.node
    point = find_start(config, node.uri, checkpoint, state, begun)
    start = point.start
    _enter_folder(stack, config, checkpoint, start.step, begun, console)
    stack.callback(keep_log, scratch.files, config.log_dir)
    console.print(plan_of(config, point), highlight=False, soft_wrap=True)
    for warning in point.warnings:
        _warn(warning, console)
    if not has_hosts:
        _enter_ray(stack, config, scratch, console)
    judges = " and judges" if config.has_local_judges else ""
    starting = f"starting {config.engines.num} engines{judges}{' and training ranks' if config.trains else ''}"
    tell(starting)
    with console.status(starting):
        devices = stack.enter_context(devices_of(config))
        again = LIFELINE.loss is not None  # a host may have been lost meanwhile
        with _lost_while("the run was started again") if again else contextlib.nullcontext():
            hosts = start_hosts(stack, config, own_host, devices, start.rewards, tell)
            crew = Crew(
                stack,
                config,
                run_id=run_id,
                node=node,
                hosts=hosts,
                run_start=start,
                batches=point.batches,
                weights_dir=scratch.weights,
                scratch=scratch.files,
                tell=tell,
            )
            controllers = crew.start_controllers(crew.team(), start)
    console.print(f"ready after {time.perf_counter() - started:.1f} s", highlight=False, soft_wrap=True)
    if LIFELINE.loss is not None:
        done = f"all started again; the run goes on after step {start.step}"
        LIFELINE.loss.note(config.run_dir, done)
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
    if config.trains:
        stopping.listen(console)
    missing = stack.enter_context(missing_hosts(wanted, config, hosts.devices)) if has_hosts and config.trains else None
    watch = Watch(config.run_dir, crew.rendezvous, reporter, node, hosts, missing, stopping, console)
    step = _run_to_the_end(crew, watch, Repairs(crew, config, start, reporter.warn_of_fault), controllers)
    if config.trains and step < config.train.steps:
        if stopping.is_to_grow:
            raise RunGrows(stopping.why())
        has_moved = step > start.step or checkpoint is None or LIFELINE.loss is not None
        raise stopping.error_after(step, run_dir=config.run_dir, has_moved=has_moved)
    return reporter


@contextmanager
def _lost_while(what: str) -> Iterator[None]:
    """Turn a WorkerError of a block into RunLost: `faults.max_restarts` says how often the run is started again then.
    `what`: what went on."""
    try:
        yield
    except WorkerError as error:
        raise RunLost(f"{error} (while {what})") from error


def _enter_folder(
    stack: ExitStack,
    config: Config,
    checkpoint: Path | None,
    step: int,
    begun: Mapping[int, BegunStep],
    console: Console,
) -> None:
    """Prepare the run's folder, tell the supervisor of it, and copy checkpoints from it until `stack` ends."""
    is_same_run = LIFELINE.loss is not None
    run_dir.prepare(config, checkpoint, step, console, begun=begun, is_same_run=is_same_run)
    run_folder, max_restarts = str(config.run_dir.absolute()), config.faults.max_restarts
    checkpoints = Checkpoints.of_run(config.run_dir.absolute(), keep=config.checkpoint.keep)
    began_at = step if step in checkpoints.steps() else step - 1  # else the first that it saves may be of this step
    LIFELINE.tell(run_dir=run_folder, max_restarts=max_restarts, began_at=began_at, step=step)
    if config.checkpoint.copy_to is not None and config.trains:
        stack.enter_context(CheckpointCopies(checkpoints, config.checkpoint.copy_to, lambda text: _warn(text, console)))


def _start_own_host(
    stack: ExitStack,
    config: Config,
    run_id: str,
    scratch: Scratch,
    console: Console,
    tell: Callable[[str], None],
) -> tuple[Config, OwnHost]:
    """Start the run's node on this host; return also the config for the hosts that are there.

    With several hosts Ray comes before the node, because it knows them, and after the node's token, which it hands to
    all workers.
    """
    has_hosts, settings, token_file = config.placement.num_hosts > 1, None, None
    shared = stack.enter_context(shared_folder(config)) if has_hosts else None
    owned = tuple(map(str, shared.folders)) if shared else ()
    LIFELINE.tell(owned=owned)
    if config.dataplane.uri is None:
        token_file = stack.enter_context(node_token(shared.root if shared else scratch.files, has_hosts=has_hosts))
    if has_hosts:
        _enter_ray(stack, config, scratch, console)
        with console.status("looking for the hosts"):
            config = fitting_hosts(config, tell)
    if config.placement.num_hosts == 1:
        shared = None
    if token_file is not None:
        settings = node_settings(
            config,
            run_id,
            scratch=scratch.files,
            token_file=token_file,
            address=own_node().address if shared else LOOPBACK,
            directory=shared.nodes if shared else None,
        )
        LIFELINE.tell(owned=(*owned, f"{settings.spill_in}/{SPILL_PREFIX}"))
    node = start_node(stack, config, settings, run_id, console)
    return config, OwnHost(scratch=scratch, node=node, settings=settings, shared=shared)


def _enter_ray(stack: ExitStack, config: Config, scratch: Scratch, console: Console) -> None:
    """Start Ray, or connect to a cluster, until `stack` ends."""
    session = ray_session(
        config.ray.address,
        num_cpus=max(config.placement.num_devices, os.cpu_count() or 1),
        scratch=scratch.files,
        env=_env(config, scratch),
    )
    with signals_held(console):
        stack.enter_context(session)
    if config.ray.address is not None and asks_for_no_token():
        _warn(
            f"the Ray cluster at {config.ray.address} asks for no token: any process that reaches it can run programs "
            "as its user; start it with RAY_AUTH_MODE=token, and set that and RAY_AUTH_TOKEN_PATH here",
            console,
        )


def _warn(text: str, console: Console) -> None:
    console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)


def _run_to_the_end(crew: Crew, watch: Watch, repairs: Repairs, controllers: list[Any]) -> int:
    """Let controllers run to the end of the run, and return the step at which it ended. After a fault that can be
    repaired, others go on."""
    while True:
        runs = [controller.run.remote() for controller in controllers]
        try:
            return watch.until_end(runs)
        except YattError as error:
            start = repairs.repair(error, controllers, runs)
        with _lost_while("controllers were started again"):
            controllers = crew.start_controllers(crew.team(), start)


def _note_logs(error: Exception, folder: Path) -> None:
    """Add to an error where its whole text is, and the logs of those that it names."""
    if folder.is_dir():
        file = folder / "launcher.log"
        with contextlib.suppress(OSError), file.open("a") as log:  # the disk may be full
            log.write("".join(traceback.format_exception(error)))
        error.add_note("logs: " + ", ".join(map(str, [*logs_of(str(error), folder), file])))


CLIENT_VARIABLES = tuple(f"DATAPLANE_{name}" for name in ("TOKEN_FILE", "TLS_CA", "TLS_CERT", "TLS_KEY"))
"""The variables of the environment that name the files with which a client enters a node."""


def _env(config: Config, scratch: Scratch) -> dict[str, str]:
    """Return the environment of every worker process."""
    return {
        "TMPDIR": str(scratch.files),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "JOBLIB_MULTIPROCESSING": "0",  # transformers imports joblib, whose semaphore would survive the process
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        **{name: str(Path(os.environ[name]).absolute()) for name in CLIENT_VARIABLES if os.environ.get(name)},
        **{name: os.environ[name] for name in (INSECURE_VARIABLE,) if name in os.environ},
        **config.ray.env,
    }
