"""Ray's object store, under a Ray that this benchmark starts.

`ray/get_ndarray` ends with a read-only view of Ray's shared memory, `ray/get_torch` with a tensor, which Ray copies.
Both read objects that an actor put. `ray/put` puts arrays from this process.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch

from benchmarks.paths.measuring import Case, Measured, measure

STORE_BYTES = 3 << 29
_ROOT = Path(__file__).resolve().parents[2]


@ray.remote(num_cpus=1)
class Putter:
    """An actor that puts objects from another process."""

    def put(self, case: Case, kind: str) -> list[Any]:
        """Put the objects of a case and return their references."""
        return [ray.put(torch.from_numpy(data) if kind == "torch" else data) for data in case.payloads()]


@contextmanager
def local_ray() -> Iterator[Any]:
    """Run a Ray with one actor during a `with` block, and yield the actor's handle. Ray's files are removed at the
    end."""
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="yatt-") as folder:
        ray.init(
            num_cpus=8,  # slots for actors that wait most of the time
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=STORE_BYTES,
            address="local",
            runtime_env={"env_vars": {"PYTHONPATH": str(_ROOT)}},
            _temp_dir=folder,
        )
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own handler ends the process and leaves its files
        try:
            yield Putter.remote()
        finally:
            ray.shutdown()


def rows(putter: Any, case: Case, *, quick: bool) -> Iterator[Measured]:
    """Measure `ray.get` of what an actor put, then `ray.put`."""
    for kind in ("torch", "ndarray"):
        refs = ray.get(putter.put.remote(case, kind))
        yield measure(f"ray/get_{kind}", case, lambda _, refs=refs: ray.get(refs), quick=quick)
        if case.count > 1:
            yield measure(f"ray/get_{kind}", case.first(), lambda _, refs=refs: ray.get(refs[:1]), quick=quick)
        del refs
    payloads = case.payloads()
    yield measure("ray/put", case, lambda _: [ray.put(payload) for payload in payloads], quick=quick)
