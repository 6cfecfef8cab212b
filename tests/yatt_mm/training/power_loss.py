"""Says what a loss of power could take from checkpoints and begun steps, at every moment of a save, from the system
calls of those that write them.

Until a file is synced, its content may be lost; until a folder is synced, the names that changed in it may be as before
or as they are now. `strace` writes down the calls (`python -m tests.yatt_mm.training.power_loss`), and `losses` reads
them.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.common import dropping, manifest
from yatt_mm.common.begun_steps import BegunSteps
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.control.commit import Commit
from yatt_mm.keeper.group_files import GroupFiles
from yatt_mm.protocol.saved_groups import SavedShare
from yatt_mm.protocol.step_meter import StepMeter
from yatt_mm.training import part_files

CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,ftruncate,truncate,fallocate,copy_file_range,sendfile,"
    "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
)
NUM_STEPS = 5
FAULTS = {
    "step_000003": (part_files, "sync_file"),
    "step_000004": (manifest, "sync_directory"),
    "step_000005": (dropping, "sync_directory"),
    "begun_000003": (manifest, "sync_file"),
}
"""[folder] a function that does nothing while this folder is saved, so that there is something to find."""


def save_steps(rank: int, model_dir: Path, root: Path) -> None:
    """Save and commit a checkpoint per step, and then the begun step after it, as a run does; write a file
    `committed_<folder>` after each."""
    engine = jobs.build_engine(model_dir, Parallel(tp=2))
    checkpoints = Checkpoints(root=root / "run" / "checkpoints", keep=1)
    for step in range(1, NUM_STEPS + 1):
        jobs._steps(engine, 1)
        folder = checkpoints.folder(step)
        with _fault(folder):
            engine.save(checkpoints.begin(step), asynchronous=True)
            if rank == 0:
                Commit(checkpoints, step, {"step": step}, num_ranks=2, best=None).finish(deadline_s=60)
                (root / f"committed_{folder.name}").touch()
            engine.finish_save()
        if rank == 0:
            _begin_step(checkpoints.begun, step + 1, root)
        dist.barrier()


def _begin_step(begun: BegunSteps, step: int, root: Path) -> None:
    with _fault(begun.folder(step)):
        files = GroupFiles(mock.Mock(), mock.Mock(), scope=None, durable=False)
        files.write(begun.begin(step) / "groups-0.arrow", SavedShare(groups=(), meter=StepMeter()))
        begun.commit(step, is_whole=True, sampling={}, config={})
        (root / f"committed_{begun.folder(step).name}").touch()


def _fault(folder: Path) -> AbstractContextManager[object]:
    """Return a block in which the function that is planted for a folder does nothing."""
    if folder.name not in FAULTS:
        return nullcontext()
    module, name = FAULTS[folder.name]
    return mock.patch.object(module, name, lambda path: None)


@dataclass(slots=True)
class Disk:
    """What is not on the disk yet. Moments are the numbers of lines of the trace."""

    unsynced_files: dict[str, int] = field(default_factory=dict)
    """[path] the moment of the last write."""
    changed_names: dict[str, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """[folder][name in it] the moment when it was made, renamed or removed."""

    def write(self, path: str, moment: int) -> None:
        self.unsynced_files[path] = moment

    def name(self, path: str, moment: int) -> None:
        folder, _, name = path.rpartition("/")
        self.changed_names[folder][name] = moment

    def remove(self, path: str, moment: int) -> None:
        self.name(path, moment)
        self.unsynced_files.pop(path, None)

    def rename(self, old: str, new: str, moment: int) -> None:
        self.name(old, moment)
        self.name(new, moment)
        self.unsynced_files = {_moved(path, old, new): at for path, at in self.unsynced_files.items()}
        folders = {_moved(path, old, new): names for path, names in self.changed_names.items()}
        self.changed_names = defaultdict(dict, folders)

    def sync(self, path: str, begun: int) -> None:
        """Note a sync of a file or a folder, which covers what had happened when it began."""
        if self.unsynced_files.get(path, begun) < begun:
            del self.unsynced_files[path]
        self.changed_names[path] = {name: at for name, at in self.changed_names[path].items() if at > begun}

    def lost_in(self, folder: str) -> list[str]:
        """Return what of a folder, with everything below it, a loss of power could take."""
        inside = [path for path in self.unsynced_files if path.startswith(f"{folder}/")]
        names = [f"{at}/{name}" for at, some in self.changed_names.items() for name in some if _is_in(at, folder)]
        return sorted({*inside, *names})


def losses(trace: Path, root: Path) -> dict[str, list[str]]:
    """Return [folder] what was wrong at any moment: it could have its name and lack a part, is called committed and
    could be gone, or loses a file while it has its name."""
    found: dict[str, list[str]] = defaultdict(list)
    disk, base = Disk(), root / "run" / "checkpoints"
    named: set[str] = set()
    for moment, begun, call, paths in _calls(trace):
        if call in ("fsync", "fdatasync"):
            disk.sync(paths[0], begun)
        elif call.startswith("rename"):
            disk.rename(*paths, moment)
            named -= _folder_of(paths[0], base)
            named |= _folder_of(paths[1], base)
        elif call in ("unlink", "unlinkat", "rmdir"):
            disk.remove(paths[0], moment)
            for name in named:
                if _is_in(paths[0], f"{base}/{name}"):
                    found[name].append(f"{paths[0]} is removed")
        else:
            if call in ("openat", "open", "creat", "mkdir", "mkdirat"):
                disk.name(paths[0], moment)
            if not call.startswith("mkdir"):
                disk.write(paths[0], moment)
            if match := re.fullmatch(rf"{re.escape(str(root))}/committed_(\w+)", paths[0]):
                wanted = zip([base, base.parent, root], [match[1], "checkpoints", "run"])
                gone = [name for folder, name in wanted if name in disk.changed_names[str(folder)]]
                found[match[1]] += [f"{name} may be gone though it was committed" for name in gone]
        for name in named:
            found[name] += [f"{path} may be lost" for path in disk.lost_in(f"{base}/{name}")]
    return {name: sorted(set(problems)) for name, problems in found.items() if problems}


def _folder_of(path: str, base: Path) -> set[str]:
    match = re.fullmatch(rf"{re.escape(str(base))}/((step|begun)_\d+)", path)
    return {match[1]} if match else set()


def _moved(path: str, old: str, new: str) -> str:
    return new + path.removeprefix(old) if _is_in(path, old) else path


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


_OPENED = re.compile(r"\d+<(/[^>]*)>")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FOLDER = re.compile(r"(?:AT_FDCWD|\d+)<(/[^>]*)>, $")


def _calls(trace: Path) -> Iterator[tuple[int, int, str, list[str]]]:
    """Yield each call that succeeded: when it ended, when it began, its name, and its paths."""
    begun: dict[str, tuple[int, str]] = {}
    for moment, line in enumerate(trace.read_text(errors="replace").splitlines()):
        pid, _, text = line.partition(" ")
        text, began = text.strip(), moment
        if text.endswith("<unfinished ...>"):
            begun[pid] = moment, text.removesuffix("<unfinished ...>")
            continue
        if match := re.match(r"<\.\.\. \w+ resumed>(.*)", text):
            began, start = begun.pop(pid)
            text = start + match[1]
        if not (match := re.match(r"(\w+)\((.*)\)\s+= (-?\d+)", text)) or int(match[3]) < 0:
            continue
        call, arguments = match[1], match[2]
        if call.startswith("open") and "O_CREAT" not in arguments:
            continue
        if paths := _paths(call, arguments):
            yield moment, began, call, paths


def _paths(call: str, arguments: str) -> list[str]:
    if call.endswith(("at", "at2")):
        found, at = [], 0
        for quoted in _QUOTED.finditer(arguments):
            name = quoted[1]
            folder = _FOLDER.search(arguments[at : quoted.start()])
            found.append(name if name.startswith("/") or folder is None else f"{folder[1]}/{name}")
            at = quoted.end()
        return found
    if call in ("rename", "open", "creat", "mkdir", "unlink", "rmdir", "truncate"):
        return [quoted[1] for quoted in _QUOTED.finditer(arguments)]
    opened = _OPENED.match(arguments)
    return [opened[1]] if opened else []


if __name__ == "__main__":
    pool = RankPool()
    pool.run(2, save_steps, Path(sys.argv[1]), Path(sys.argv[2]))
    pool.close()
