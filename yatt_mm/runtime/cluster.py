"""Ray for one run: the run's own local cluster, or a connection to an existing one."""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
from ray._private import ray_constants, services, utils, worker
from ray._private.node import Node
from ray._raylet import (  # type: ignore[attr-defined]  # a compiled module
    AuthenticationTokenLoader,
    Config,
)

from dataplane.core.child_process import wait_for_killed
from yatt_mm.common.errors import ConfigError, WorkerError
from yatt_mm.common.owned_dirs import MAX_SOCKET_LENGTH
from yatt_mm.common.tokens import write_token
from yatt_mm.runtime import ray_agent
from yatt_mm.runtime.signals import set_signals_again
from yatt_mm.runtime.supervised import LIFELINE

CONNECT_TIMEOUT_S = 10.0
START_TIMEOUTS_S = (30.0, 60.0, 60.0, 120.0, 120.0)
"""The seconds that Ray has for each attempt to start. (Its raylet gives up by itself if an agent that it starts is
not there after 15 s.)"""
END_TIMEOUT_S = 5.0
POLL_S = 0.5
RAY_TOKEN = "ray_token"
"""The name of the file with Ray's token."""
OBJECT_STORE_BYTES = 100 * 2**20
"""The size of Ray's object store. It is small, because Ray carries calls and refs only, and all large data goes through
the data plane."""

_SERVERS = ("gcs_server", "raylet")
"""Ray's processes without which no call of Ray comes to an end."""
_UNNEEDED = ("api_server", "monitor", "log_monitor")
"""What Ray starts for its web page, for clusters that grow, and for logs on the console: a run has none of these."""
_SOCKET = "--raylet_socket_name="
"""The argument of a raylet with the path of the socket on which it listens when it has started."""
_IS_ERROR = re.compile(r" [ECF] \d+ \d+\] ")

log = logging.getLogger(__name__)


@contextmanager
def ray_session(address: str | None, *, num_cpus: int, scratch: Path, env: Mapping[str, str]) -> Iterator[None]:
    """Connect to Ray for a block. Without an address Ray is started here and stopped at the end.

    `env` is set in every worker process.

    Raises:
        ConfigError: the cluster at the address does not answer, or `scratch` is too long for Ray's sockets.
        WorkerError: Ray could not start.
    """
    before, processes, watching = dict(os.environ), dict[str, Any](), threading.Event()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": False,
        "configure_logging": False,
    }
    try:
        with _our_signals():
            if address is not None:
                _connect(address, runtime_env={"env_vars": dict(env)}, **common)
            else:
                _check_room_for_sockets(scratch / "ray")
                os.environ.update(env)  # a local Ray passes the environment to its workers
                os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(write_token(scratch / RAY_TOKEN)))
                os.environ.pop("RAY_AUTH_TOKEN", None)  # it would count before the file
                _read_environment()
                _start(scratch / "ray", num_cpus=num_cpus, **common)
                processes = _servers()
        threading.Thread(target=_watch_servers, args=(processes, watching), name="Ray's servers", daemon=True).start()
        yield
    finally:
        watching.set()
        _stop()
        os.environ.clear()
        os.environ.update(before)
        _read_environment()


def _start(folder: Path, **options: Any) -> None:
    """Start a local cluster for this run, with its files in `folder`. It has no other address than 127.0.0.1 (Ray does
    the same by itself where it supports clusters of one machine only), and every call to it must show a token that only
    this user can read. What could answer without it, the counters of Ray's agent, is not started.

    On a busy machine it happens that a server of Ray does not come up. So Ray is started again if a server ends or is
    not heard of; the later attempts have longer.

    Raises:
        WorkerError: Ray could not start. It names what Ray's servers wrote last.
    """
    for attempt, timeout_s in enumerate(START_TIMEOUTS_S, 1):
        try:
            unneeded = [(Node, f"start_{name}", _nothing) for name in _UNNEEDED]
            local = (ray_constants, "ENABLE_RAY_CLUSTER", False)
            with _patched(local, *unneeded, _silent_agent()), _watched_start(timeout_s):
                ray.init(
                    include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=str(folder), **options
                )
            return
        except Exception as error:  # Ray has no error class of its own for this
            found = f"Ray could not start on this machine: {error}{_last_words(folder)} The load is "
            found += f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
            if attempt == len(START_TIMEOUTS_S):
                raise WorkerError(
                    f"{found}; try again when it is lower, or name a running cluster in ray.address"
                ) from error
            log.warning("%s; it is started again", found)


def _check_room_for_sockets(folder: Path) -> None:
    longest = folder / f"session_0000-00-00_00-00-00_000000_{os.getpid()}" / "sockets" / "plasma_store"
    num_over = len(os.fsencode(longest)) - MAX_SOCKET_LENGTH
    if num_over > 0:
        parent = tempfile.gettempdir()
        raise ConfigError(
            f"the temporary folder {parent} has {len(os.fsencode(parent))} bytes, {num_over} too many for the paths "
            "of Ray's sockets in it: set TMPDIR to a shorter path, such as /tmp, or name a running cluster in "
            "ray.address"
        )


def _silent_agent() -> tuple[ModuleType, str, Any]:
    """Return the change of Ray with which `ray_agent` runs the agent of its node."""
    command_of = services._build_python_executable_command_memory_profileable

    def build(component: str, *arguments: Any, **options: Any) -> list[str]:
        is_agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT
        return [*command_of(component, *arguments, **options), *([ray_agent.__file__] if is_agent else [])]

    return services, command_of.__name__, build


def _nothing(*arguments: Any, **options: Any) -> None:
    """Stand for what is not started."""


def _last_words(folder: Path) -> str:
    """Return the last error that each of Ray's servers has written in its newest session."""
    said = []
    for name in _SERVERS:
        files = [folder / "session_latest" / "logs" / f"{name}.{kind}" for kind in ("out", "err")]
        lines = [line for file in files if file.is_file() for line in file.read_text(errors="replace").splitlines()]
        if errors := [line for line in lines if _IS_ERROR.search(line)]:
            said.append(f" {name} wrote: {errors[-1][-500:]}")
    return "".join(said)


def _servers() -> dict[str, Any]:
    """Return the servers of the cluster that was started here."""
    node: Any = worker._global_node
    return {kind: node.all_processes[kind][0].process for kind in _SERVERS}


def _watch_servers(servers: Mapping[str, Any], is_over: threading.Event) -> None:
    """End this process as soon as a server of Ray is gone, unless it has no supervisor. Its calls of Ray would only end
    after a minute, and then end it too."""
    while not is_over.wait(POLL_S):
        for kind, process in servers.items():
            status = process.poll()
            if status is not None and not is_over.is_set():
                LIFELINE.end(f"Ray's {kind} is gone (status {status})")


@contextmanager
def _patched(*changes: tuple[ModuleType | type, str, Any]) -> Iterator[None]:
    """Change names of modules and classes of Ray during a block."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


class _NotStartedError(Exception):
    """A server of Ray ended, or is not heard of. (Ray would ask again after a RuntimeError.)"""


@contextmanager
def _watched_start(timeout_s: float) -> Iterator[None]:
    """Let Ray's node have `timeout_s` to appear during the block, unless a server ends before. The processes that Ray
    started are ended if it does not. Ray gives it 30 s, whatever happens: so long does one question for the node take,
    and it is asked when the raylet listens."""
    started: list[Any] = []
    find, start, deadline_s = services.get_node, services.ConsolePopen, time.monotonic() + timeout_s

    def popen(*arguments: Any, **options: Any) -> Any:
        started.append(start(*arguments, **options))
        return started[-1]

    def get_node(*arguments: Any) -> Any:
        sockets = [Path(word.partition("=")[2]) for one in started for word in one.args if word.startswith(_SOCKET)]
        while True:
            for process in started:
                name = Path(process.args[0]).name
                if name in _SERVERS and process.poll() is not None:
                    raise _NotStartedError(f"its {name} ended with status {process.returncode}.")
            if all(path.exists() for path in sockets):
                with suppress(RuntimeError):  # the node is not known yet
                    return find(*arguments)
            if time.monotonic() > deadline_s:
                raise _NotStartedError(f"its node did not appear in {timeout_s:g} s.")
            time.sleep(POLL_S / 10)

    try:
        with _patched((services, "get_node", get_node), (services, "ConsolePopen", popen)):
            yield
    except Exception:
        ray.shutdown()
        set_signals_again()
        for process in started:
            process.kill()
        for process in started:
            wait_for_killed(process, Path(process.args[0]).name, END_TIMEOUT_S)
        raise


def _read_environment() -> None:
    """Let Ray read its settings from the environment again; it reads them once, when it is imported."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def asks_for_no_token() -> bool:
    """Return True if the cluster to which this process is connected answers a call that shows no token."""
    import grpc

    with grpc.insecure_channel(ray.get_runtime_context().gcs_address) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")(b"", timeout=CONNECT_TIMEOUT_S)
        except grpc.RpcError:
            return False
    return True


def _stop() -> None:
    """Disconnect from Ray, and stop the processes that were started here.

    Ray's core gives signals their default effect when it ends, and a second signal would end the launcher before its
    folders are removed. So the handlers of signals are set again before Ray's processes end, which takes a second.
    """
    node: Any = worker._global_node
    if node is not None:
        end_processes = node.kill_all_processes

        def end_processes_with_our_handlers(**options: Any) -> None:
            set_signals_again()
            end_processes(**options)

        node.kill_all_processes = end_processes_with_our_handlers
    ray.shutdown()
    set_signals_again()


@contextmanager
def _our_signals() -> Iterator[None]:
    """Leave signals to the launcher alone, which stops the run in order, while Ray starts during a block.

    Ray starts its processes in process groups of their own: a signal to the launcher's group (Ctrl-C in a terminal,
    `timeout`, schedulers) does not reach them, and Ray does not wait a minute for processes that are gone. And Ray
    installs no handler of SIGTERM, which would end the launcher at once.
    """
    popen = functools.partial(services.ConsolePopen, process_group=0)
    with _patched((services, "ConsolePopen", popen), (utils, "set_sigterm_handler", lambda handler: None)):
        yield


def _connect(address: str, **options: Any) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdigit():
            socket.create_connection(
                (host, int(port)), timeout=CONNECT_TIMEOUT_S
            ).close()  # Ray's own attempt ends the process
        ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"ray.address is {address!r}: {error}; name a running cluster with Ray {ray.__version__}, set the "
            "RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH that it was started with, or leave it out to start Ray here"
        ) from error
