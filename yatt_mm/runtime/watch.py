"""Watches a run: hands its records to people, and tells controllers to stop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from yatt_mm.common.ray_calls import fetch, own_words, wait_all
from yatt_mm.hosts.host_count import MissingHosts
from yatt_mm.hosts.run_hosts import RunHosts
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.reporting.fault_log import FaultLog
from yatt_mm.reporting.report import Reporter
from yatt_mm.runtime.stopping import Stopping
from yatt_mm.runtime.supervised import LIFELINE

POLL_S = 0.2
RECORDS_DEADLINE_S = 120.0


class Watch:
    """Watches one run from its beginning to its end, over all restarts of its controllers."""

    def __init__(
        self,
        run_dir: Path,
        rendezvous: Any,
        reporter: Reporter,
        node: RunNode,
        hosts: RunHosts,
        missing: MissingHosts | None,
        stopping: Stopping,
        console: Console,
    ) -> None:
        """`missing`: what waits for hosts that the run lacks, if it lacks some."""
        self._rendezvous = rendezvous
        self._reporter = reporter
        self._node = node
        self._hosts = hosts
        self._missing = missing
        self._stopping = stopping
        self._console = console
        self._faults = FaultLog(run_dir)
        self._num_node_restarts = 0
        self._is_told = False
        """True if the controllers were told to stop."""

    def until_end(self, runs: Sequence[Any]) -> int:
        """Show records until every controller is finished, and return the step at which they ended. The first failure
        is raised. Controllers are told to stop when it is time. `runs`: [controller] the calls in which they run.

        Raises:
            YattError: what a controller raised, or WorkerError if one was lost.
        """
        step, left = 0, list(runs)
        while left:
            done, left = ray.wait(left, num_returns=len(left), timeout=0)
            self._take_records(wait_s=0.0 if done else POLL_S)
            for run in done:
                with own_words():
                    step = fetch(run, name=f"controller {runs.index(run)}", what="the run")
            self._node.check()
            self._hosts.check()
            self._stopping.take(self._reporter.last)
            if self._missing is not None and self._missing.are_there():
                self._stopping.use_more_hosts(f"{self._missing.num} more host(s) can be used")
                self._missing = None
            if not self._is_told and (why := self._stopping.why()):
                self._rendezvous.stop.remote()
                self._is_told = True
                then = "starting again with them" if self._stopping.is_to_grow else "stopping"
                self._console.print(f"{why}: saving and {then}; a second signal stops at once", soft_wrap=True)
        self._take_records(wait_s=0.0)
        return step

    def _take_records(self, *, wait_s: float) -> None:
        call = ("the rendezvous", self._rendezvous.news.remote(wait_s))
        (news,) = wait_all([call], what="handing over records", deadline_s=RECORDS_DEADLINE_S)
        records, progress = news
        LIFELINE.tell(phase=progress.phase, **({} if progress.step is None else {"step": progress.step}))
        num_restarts = self._node.num_restarts + self._hosts.num_restarts
        if num_restarts > self._num_node_restarts:
            self._num_node_restarts = num_restarts
            self._faults.add(
                who="the data-plane node",
                role="node",
                phase=progress.phase,
                step=progress.at_step,
                why="it died",
                done="started again",
                seconds=max(self._node.last_restart_s, self._hosts.last_restart_s),
            )
        for record in records:
            if record["kind"] == "step":
                record["dataplane/num_restarts"] = num_restarts
            self._reporter.take(record)
