"""Python imports this file in every process of a run whose PYTHONPATH has this folder. Controllers then write down when
they come to a phase, when they have finished a group, and which finished groups the rendezvous has, so that a test can
kill a process at that moment, and see what is done again; and ranks do not finish the checkpoint of one folder, so that
a test can kill them before they have."""

from __future__ import annotations

import builtins
import os
import sys
import time
from pathlib import Path
from typing import Any

HELD_S = 60
"""The longest time for which a checkpoint is held."""

_import = builtins.__import__


def _import_and_wrap(name: str, *arguments: Any, **more: Any) -> Any:
    found = _import(name, *arguments, **more)
    for module_name, (attribute, wrap) in WRAPPERS.items():
        module = sys.modules.get(module_name)
        if module is not None and hasattr(module, attribute):
            builtins.__import__ = _import
            wrap(module)
    return found


def _tell_phases(module: Any) -> None:
    client = module.RendezvousClient
    meet, land = client._meet, client.land

    def tell(step: int, phase: str, *more: Any) -> None:
        with Path(os.environ["YATT_TEST_PHASES"]).open("a") as file:
            file.write(" ".join(map(str, (step, phase, os.getpid(), *more))) + "\n")

    def meet_and_tell(self: Any, *arguments: Any) -> Any:
        tell(self.step, self.phase)
        return meet(self, *arguments)

    def land_and_tell(self: Any, news: Any, groups: Any = ()) -> Any:
        step = self.step

        def tell_landed(reply: Any) -> None:
            for saved in groups if reply.exception() is None else ():
                ref = saved.group.ref
                tell(step, "landed", saved.slot.position, f"{ref.name}/{ref.version}".replace(" ", "_"))

        landed = land(self, news, groups)
        landed.future().add_done_callback(tell_landed)
        tell(step, "finished")
        return landed

    client._meet, client.land = meet_and_tell, land_and_tell


def _hold_checkpoint(module: Any) -> None:
    note_written = module.note_written

    def note_later(path: Path, *arguments: Any) -> None:
        if str(path.parent) == os.environ.get("YATT_TEST_HELD"):
            time.sleep(HELD_S)
        note_written(path, *arguments)

    module.note_written = note_later


WRAPPERS = {
    "yatt_mm.batching.rendezvous_client": ("RendezvousClient", _tell_phases),
    "yatt_mm.training.rank_checkpoint": ("PendingSave", _hold_checkpoint),
}
"""[module] what it has as soon as it can be wrapped, and what wraps it. A process imports one of them."""

if "YATT_TEST_PHASES" in os.environ:
    builtins.__import__ = _import_and_wrap
