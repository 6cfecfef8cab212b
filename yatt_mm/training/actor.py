"""The Ray actor of a training rank. Importing this is cheap: torch and Megatron load in the actor's process."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from models.layout.parallel import Parallel
from models.registry import load_family
from yatt_mm.common.cores import pin_to_cores
from yatt_mm.common.held_memory import StateReport, held_bytes
from yatt_mm.common.large_imports import large_imports
from yatt_mm.protocol.placement_model import State
from yatt_mm.protocol.published import DeviceSegment, WeightStream
from yatt_mm.protocol.training import TrainSpec, UpdateReport
from yatt_mm.training.step_plan import UpdatePlan

if TYPE_CHECKING:
    from yatt_mm.training.worker import TrainWorker


class TrainActor:
    """The body of the Ray actor; `yatt_mm.training.worker` does the work."""

    def __init__(self, *, rank: int, spec: TrainSpec, parallel: Parallel, dataplane_uri: str) -> None:
        self._rank = rank
        self._spec = spec
        self._parallel = parallel
        self._dataplane_uri = dataplane_uri
        self._worker: TrainWorker | None = None
        self._store: object = None
        """Where the ranks meet, if this one has opened it."""

    def meet(self, address: str) -> str:
        """Open a store in which the ranks of a run over several hosts can meet, at any port of this host's address.
        Return its URL. Any process that reaches it could take part: the network between the hosts must be trusted."""
        with large_imports():
            import torch.distributed as dist

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)  # torch's own listens at every address
        port, file = listener.getsockname()[1], listener.detach()
        self._store = dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
        return f"tcp://{address}:{port}"

    def load_modules(self) -> None:
        """Load what `start` needs and takes no memory of a device, so that a rank can do it before its turn."""
        pin_to_cores(self._spec.cores)
        with large_imports():
            import yatt_mm.training.worker  # noqa: F401

            load_family(Path(self._spec.model_dir))

    def start(self, store: str) -> None:
        """Join the training world, which meets in `store`, and load the model. Waits for all other ranks."""
        self.load_modules()
        from yatt_mm.training.worker import TrainWorker

        self._worker = TrainWorker(
            rank=self._rank, spec=self._spec, parallel=self._parallel, dataplane_uri=self._dataplane_uri
        )
        self._worker.start(store)

    def set_state(self, state: State) -> StateReport:
        """Put the rank to sleep, let it hold weights only, or wake it up. Return the memory that it holds then."""
        moved = self._started().set_state(state)
        return StateReport(held_bytes=held_bytes(), moved=moved)

    def update(self, plan: UpdatePlan, step: int) -> UpdateReport:
        """Train one step and return its report."""
        return self._started().update(plan, step)

    def divergences(self, plan: UpdatePlan, step: int) -> list[tuple[str, int, float]]:
        """Return (name of the group's record, row, divergence from the reference) of each planned response."""
        return self._started().divergences(plan, step)

    def pass_over(self, step: int) -> None:
        """Go to the next step with the same weights."""
        self._started().pass_over(step)

    def settle(self) -> int | None:
        """Finish what is being written, sleep, and return the step whose update the weights have; None if an update was
        broken off."""
        return self._started().settle()

    def publish(self, path: str, version: int) -> DeviceSegment | WeightStream | None:
        """Make the weights readable for the engines. Return what engines need besides the path; None if the path is
        enough."""
        return self._started().publish(path, version)

    def save(self, directory: str, asynchronous: bool) -> None:
        """Write this rank's part of a checkpoint into `directory`; if `asynchronous`, a thread writes it while
        training continues."""
        self._started().save(directory, asynchronous)

    def finish_save(self) -> None:
        """Wait for this rank's part of the checkpoint that is being written."""
        self._started().finish_save()

    def load(self, directory: str, step: int) -> None:
        """Continue from a checkpoint of `step`."""
        self._started().load(directory, step)

    def save_hf(self, directory: str) -> None:
        """Write the model as a Hugging Face folder."""
        self._started().save_hf(directory)

    def take_sent_bytes(self) -> dict[str, int]:
        """Return what the rank sent to other hosts since the last call, in bytes by kind."""
        return self._started().sent.take()

    def _started(self) -> TrainWorker:
        if self._worker is None:
            raise RuntimeError(f"training rank {self._rank} has not been started")
        return self._worker
