"""Says what a loss of power could take from checkpoints, at every moment of a save, from the system calls of the ranks.

Until a file is synced, its content may be lost; until a folder is synced, the names that changed in it may be as before
or as they are now. `strace` writes down the calls (`python -m tests.yatt_mm.training.power_loss`), and `losses` reads
them.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from models.layout.parallel import Parallel
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from yatt_mm.common import dropping, manifest
from yatt_mm.common.checkpoints import Checkpoints
from yatt_mm.control.commit import Commit
from yatt_mm.training import part_files

CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,ftruncate,truncate,fallocate,copy_file_range,sendfile,"
    "fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
)
GOOD_STEPS = (1, 2)
FAULTS = {
    3: (part_files, "sync_file"),
    4: (manifest, "sync_directory"),
    5: (dropping, "sync_directory"),
}
"""By step a function that does nothing in the commit of that step, so that there is something to find."""


def save_steps(rank: int, model_dir: Path, root: Path) -> None:
    """Save and commit a checkpoint per step, as a run does; write a file `committed_<step>` after each."""
    engine = jobs.build_engine(model_dir, Parallel(tp=2))
    checkpoints = Checkpoints(root=root / "run" / "checkpoints", keep=1)
    for step in (*GOOD_STEPS, *FAULTS):
        jobs._steps(engine, 1)
        module, name = FAULTS.get(step, (manifest, "__doc__"))
        with mock.patch.object(module, name, lambda path: None):
            engine.save(checkpoints.begin(step), asynchronous=True)
            if rank == 0:
                Commit(checkpoints, step, {"step": step}, num_ranks=2, best=None).finish(deadline_s=60)
                (root / f"committed_{step}").touch()
            engine.finish_save()
        dist.barrier()


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


def losses(trace: Path, root: Path) -> dict[int, list[str]]:
    """Return by step what was wrong at any moment: a checkpoint that could have its name and lack a part, one that is
    called committed and could be gone, or one that loses a file while it has its name."""
    found: dict[int, list[str]] = defaultdict(list)
    disk, base = Disk(), root / "run" / "checkpoints"
    named: set[int] = set()
    for moment, begun, call, paths in _calls(trace):
        if call in ("fsync", "fdatasync"):
            disk.sync(paths[0], begun)
        elif call.startswith("rename"):
            disk.rename(*paths, moment)
            named -= _step_of(paths[0], base)
            named |= _step_of(paths[1], base)
        elif call in ("unlink", "unlinkat", "rmdir"):
            disk.remove(paths[0], moment)
            for step in named:
                if _is_in(paths[0], f"{base}/step_{step:06d}"):
                    found[step].append(f"{paths[0]} is removed")
        else:
            if call in ("openat", "open", "creat", "mkdir", "mkdirat"):
                disk.name(paths[0], moment)
            if not call.startswith("mkdir"):
                disk.write(paths[0], moment)
            if match := re.fullmatch(rf"{re.escape(str(root))}/committed_(\d+)", paths[0]):
                step, parents = int(match[1]), [base, base.parent, root]
                wanted = [f"step_{step:06d}", "checkpoints", "run"]
                gone = [name for folder, name in zip(parents, wanted) if name in disk.changed_names[str(folder)]]
                found[step] += [f"{name} may be gone though it was committed" for name in gone]
        for step in named:
            found[step] += [f"{path} may be lost" for path in disk.lost_in(f"{base}/step_{step:06d}")]
    return {step: sorted(set(problems)) for step, problems in found.items() if problems}


def _step_of(path: str, base: Path) -> set[int]:
    match = re.fullmatch(rf"{re.escape(str(base))}/step_(\d+)", path)
    return {int(match[1])} if match else set()


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
