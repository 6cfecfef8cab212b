"""Starts whole runs for tests: small shards of real digits, the command line in a child process, and a check of what it
leaves behind."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from tests.dataplane.shards import encode, write_tar
from yatt_mm.common.owned_dirs import LOCK_FILE

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500.0
ENGINE = "EngineCore|spawn_main"
"""A pattern for processes in which vLLM computes. A run starts no other processes by multiprocessing, and they do not
always have a title."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The result of one run of the command line."""

    status: int
    output: str
    left_behind: list[str]
    """The processes, shared-memory segments and temporary files that outlived the run."""


def write_shard(path: Path, numbers: range, *, corrupt: tuple[int, ...] = ()) -> None:
    """Write digits as a WebDataset shard. The `corrupt` ones end in the middle of their image data."""
    from sklearn.datasets import load_digits  # takes a second, and many that start runs write no shard

    digits = load_digits()
    members: dict[str, bytes] = {}
    for number in numbers:
        image = encode(Image.fromarray((digits.images[number] * 15).astype("uint8")).resize((56, 56)))
        members[f"{number:06d}.png"] = image[: len(image) // 2] if number in corrupt else image
        fields = {"question": "What digit is this?", "answer": str(digits.target[number])}
        members[f"{number:06d}.json"] = json.dumps(fields).encode()
    write_tar(path, members)


def arguments(folder: Path, model: Path, name: str, *overrides: str) -> list[str]:
    """Return the arguments of a small deterministic run on the shards in `folder`."""
    return [
        "configs/digits_cpu.yaml",
        f"run.name={name}",
        f"run.dir={folder / 'runs'}",
        f"model.path={model}",
        f"data.train={folder}/train-*.tar",
        f"data.eval={folder}/eval-*.tar",
        "dataplane.memory=64MiB",
        "rollout.deterministic=true",
        "rollout.group_size=4",
        "rollout.max_tokens=3",
        "train.prompts_per_step=8",
        "train.num_minibatches=2",
        "train.lr_final_frac=1",
        "reward.function=tests.yatt_mm.any_reward:even_length",
        "sampling.replace_groups=true",
        "eval.every=2",
        "checkpoint.every=2",
        *overrides,
    ]


ONE_OF_EACH = ("placement.num_devices=1", "rollout.num_engines=1", "controllers.num=1")
"""Overrides of a run with one device, one engine, one rank and one controller."""


def judge(model: Path) -> tuple[str, ...]:
    """Return overrides that leave the reward to a judge, which is the same tiny model as the policy."""
    return (
        "reward.weight=0",
        f"reward.judges.tiny.model={model}",
        'reward.judges.tiny.yes_words=[" Yes"]',
        'reward.judges.tiny.no_words=[" one"]',
        "reward.judges.tiny.kv_cache_memory=64MiB",
        "reward.judges.tiny.max_model_len=256",
    )


@contextmanager
def started(
    command: list[str], *, temporary: Path, module: str = "yatt_mm.train"
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `python -m yatt_mm.train`, or another module, in a session of its own during a `with` block, with a mark in
    the environment that all its children have. It is a path too, because those of a data-plane node get hardly more
    than `PYTHONPATH`.

    Processes that still run when the block ends, because a test failed in it, are killed.
    """
    mark = f"YATT_TEST_MARK={uuid.uuid4().hex}"
    paths = filter(None, (os.environ.get("PYTHONPATH"), f"/{mark}"))
    env = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *command],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def finish(
    process: subprocess.Popen[str], mark: str, before: set[str], temporary: Path, *, deadline_s: float = DEADLINE_S
) -> Finished:
    """Wait for the end of a run and return its result, with everything that it left behind."""
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the run did not end in {deadline_s:g} s:\n{output}") from None
    deadline = time.monotonic() + 30
    while (left := leftovers(mark, before, temporary)) and time.monotonic() < deadline:
        time.sleep(0.1)  # the kernel takes a moment to end what was told to end
    return Finished(status=process.returncode, output=output, left_behind=left)


def run(command: list[str], *, module: str = "yatt_mm.train") -> Finished:
    """Run the command to its end and return the result."""
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="yt-") as temporary:
        with started(command, temporary=Path(temporary), module=module) as (process, mark):
            return finish(process, mark, before, Path(temporary))


def run_until(line: str, act: Callable[[subprocess.Popen[str], str], None], command: list[str]) -> Finished:
    """Start a run, call `act(process, mark)` when it has said `line`, and return how the run ended."""
    before = shared_memory()
    with (
        tempfile.TemporaryDirectory(prefix="yt-") as temporary,
        started(command, temporary=Path(temporary)) as (process, mark),
    ):
        assert process.stdout is not None
        seen = []
        for said in process.stdout:
            seen.append(said)
            if line in said:
                break
        assert process.poll() is None, "".join(seen)
        act(process, mark)
        return finish(process, mark, before, Path(temporary))


def shared_memory() -> set[str]:
    """Return the names of all shared-memory segments."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def leftovers(mark: str, before: set[str], temporary: Path) -> list[str]:
    """Return the processes with the mark, and the files that appeared in shared memory or the temporary folder and
    belong to no other process."""
    appeared = shared_memory() - before
    left = [str(path) for path in temporary.iterdir()]
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit():
                continue
            if mark.encode() in (entry / "environ").read_bytes():
                left.append(f"{entry.name}: {(entry / 'cmdline').read_bytes().replace(bytes(1), b' ')[:200]!r}")
            elif appeared:
                appeared -= mapped_segments((entry / "maps").read_text())
        except OSError:
            continue
    held = {name for name in appeared if _is_held(Path("/dev/shm") / name)}
    held |= {name for name in appeared if name.startswith("sem.") and _folder_of(name, temporary)}
    held |= {name for name in appeared if any(name.startswith(f"sem.{folder}-") for folder in held)}
    return left + [f"/dev/shm/{name}" for name in appeared - held]


def mapped_segments(maps: str) -> set[str]:
    """Return the names of the shared-memory segments that a process has mapped, if `maps` is its list of mappings.

    A semaphore has another name when it is made than afterwards, so a segment is known by its number.
    """
    numbers = set(re.findall(r" (\d+) +/dev/shm/", maps))
    names = set()
    for path in Path("/dev/shm").iterdir() if numbers else ():
        with suppress(OSError):
            if str(path.stat().st_ino) in numbers:
                names.add(path.name)
    return names


def _folder_of(semaphore: str, temporary: Path) -> Path | None:
    """Return the folder of another run after which a semaphore is named. It may be that of an engine that was killed,
    and that run removes both."""
    name = semaphore.removeprefix("sem.").rpartition("-")[0]
    found = map(Path, glob.glob(f"{temporary.parent}/yt-*/**/{name}", recursive=True))
    return next((folder for folder in found if not folder.is_relative_to(temporary)), None)


def _is_held(folder: Path) -> bool:
    """Return True for a folder (`yatt_mm.common.owned_dirs`) of another run that has not ended."""
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def wait_for_process(mark: str, pattern: str, *, deadline_s: float) -> int:
    """Return the id of a process of the run whose command line or title matches the regular expression."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir():
            try:
                is_ours = entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes()
                if is_ours and re.search(pattern, (entry / "cmdline").read_text(errors="replace")):
                    return int(entry.name)
            except OSError:
                continue
        time.sleep(0.05)
    raise AssertionError(f"no process {pattern} appeared in {deadline_s:g} s")


CURVE = ("eval/accuracy", "reward/mean", "train/loss", "train/entropy", "train/grad_norm", "rollout/num_tokens")


def curve(folder: Path, name: str) -> list[dict[str, float]]:
    """Return what must be the same in two runs, by step."""
    return [{key: record[key] for key in CURVE if key in record} for record in metrics(folder, name)]


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the records of a run's metrics.jsonl."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
