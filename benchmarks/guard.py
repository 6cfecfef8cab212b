"""Proves that a refactoring changed nothing: two commits run the digits example, and every number must be the same.

Each commit is checked out into a temporary folder and gets an environment of its own there. Both train on the same data
with seed 0 and `rollout.deterministic=true`, one run after the other, and the numbers of every step and the exported
weights are compared bit for bit. What differs between two runs of one commit is left out (`LEFT_OUT`).
Exit status: 0 all equal, 1 a difference, 2 an error, 130 interrupted.

    python benchmarks/guard.py OLD NEW [--steps 10] [--layouts dp2 tp2] [--data FOLDER] [--json]

This file imports nothing of the project: the working tree around it may be broken.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import site
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

Values = dict[tuple[int, str], str]
"""The repr of every value, by step and key. A repr tells 0.0 from -0.0, and nan equals nan."""

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "configs/digits_cpu.yaml"
LAYOUTS: dict[str, list[str]] = {"dp2": [], "tp2": ["train.parallel.tp=2"]}
LEFT_OUT = re.compile(r"^(dataplane|placement)/|[_/](s|bytes)(_|$)")
"""The keys that are not compared: those with seconds or bytes, and those of the data plane and of placement, which work
while a step runs."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PREPARE_LIMIT_S = 1200.0
START_LIMIT_S = 600.0
STEP_LIMIT_S = 60.0
STOP_LIMIT_S = 90.0
NUM_TAIL_LINES = 40
WRITE_METADATA = "import sys, setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
LOCATE = """
import importlib, importlib.metadata, json, sys
project = importlib.metadata.distribution(sys.argv[1])
packages = project.read_text("top_level.txt").split()
found = {package: importlib.import_module(package).__file__ for package in packages}
print(json.dumps({"metadata": str(project.locate_file("")), **found}))
"""


class GuardError(RuntimeError):
    """The comparison could not be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two commits, with its folder and its Python environment."""

    name: str
    folder: Path
    """The folder that holds everything of the commit and nothing else."""
    checkout: Path
    python: Path
    """The Python interpreter of the commit's environment."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the runs of two commits and print the result. Return the exit status."""
    options = _parser().parse_args(arguments)
    console = Console(stderr=options.json, highlight=False, markup=False)
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="yatt-guard-", ignore_cleanup_errors=True) as folder:
            rows, compared = guard(options, Path(folder), console)
    except GuardError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the run has been stopped, the checkouts have been removed", file=sys.stderr)
        return 130
    show(rows, compared, console)
    if options.json:
        print(json.dumps({"rows": rows, "compared": compared, "left_out": LEFT_OUT.pattern}))
    return 1 if any(row["num_different"] for row in rows) else 0


def guard(options: argparse.Namespace, folder: Path, console: Console) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the digits run of both commits, the old and the new. Return one row for each layout, and the keys that were
    compared."""
    rows, compared = [], {}
    with ExitStack() as stack:
        sides = []
        for name, revision in (("old", options.old), ("new", options.new)):
            commit = _ask(ROOT, "git", "rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")
            title = _ask(ROOT, "git", "log", "-1", "--format=%h %s", commit)
            console.print(f"{name}: {title}", soft_wrap=True)
            sides.append(stack.enter_context(checked_out(name, commit, folder / name)))
            make_environment(sides[-1])
        data = prepared_data(options.data, sides[0], console)
        for layout in dict.fromkeys(options.layouts):
            old, new = (run(side, layout, options.steps, data, console) for side in sides)
            rows.append({"layout": layout, "num_steps": options.steps, **compare(old, new)})
            compared.update(dict.fromkeys(key for _, key in [*old, *new] if not LEFT_OUT.search(key)))
    return rows, sorted(compared)


@contextmanager
def checked_out(name: str, commit: str, folder: Path) -> Iterator[Side]:
    """Check the commit out into a git worktree, yield it as a `Side`, and remove it at the end of the `with` block."""
    side = Side(name=name, folder=folder, checkout=folder / "checkout", python=folder / "env" / "bin" / "python")
    try:
        _ask(ROOT, "git", "worktree", "add", "--detach", str(side.checkout), commit)
        yield side
    finally:
        with suppress(GuardError):  # it was never added
            _ask(ROOT, "git", "worktree", "remove", "--force", str(side.checkout))


def make_environment(side: Side) -> None:
    """Give the side a virtual environment: its checkout, and the packages of the interpreter that runs this file.

    The project's metadata are written anew, because vLLM finds plugins by the entry points in them, and the first
    metadata of a name on Python's path are used. A check from outside of the checkout makes sure that everything comes
    from the side's folder, because Ray's and vLLM's processes may start anywhere; they run the same interpreter. Raises
    GuardError if the check fails.
    """
    venv.create(side.folder / "env", symlinks=True, with_pip=False)
    installed = next((side.folder / "env" / "lib").glob("python*/site-packages"))
    paths = [str(side.checkout), *site.getsitepackages()]
    (installed / "checkout.pth").write_text("".join(f"{path}\n" for path in paths))
    name = _ask(side.checkout, sys.executable, "-c", WRITE_METADATA, str(installed)).split("-")[0]
    for what, path in json.loads(_ask(side.folder, str(side.python), "-c", LOCATE, name)).items():
        if not Path(path).resolve().is_relative_to(side.folder.resolve()):
            raise GuardError(f"{what} of the {side.name} commit comes from {path}, not from {side.folder}")


def prepared_data(given: Path | None, side: Side, console: Console) -> Path:
    """Return the folder with shards and model: the given one, that of this working tree, or a new one that the side's
    code makes."""
    folder = (given or ROOT / "examples" / "digits" / "data").resolve()
    if (folder / "prepared.json").is_file():
        return folder
    if given:
        raise GuardError(f"{folder} has no prepared.json; make it: python -m examples.digits.prepare --out {given}")
    command = [str(side.python), "-m", "examples.digits.prepare", "--out", str(side.folder / "data")]
    _execute(side, command, "making the data", PREPARE_LIMIT_S, console, lambda: "")
    return side.folder / "data"


def run(side: Side, layout: str, num_steps: int, data: Path, console: Console) -> Values:
    """Train one side in one layout. Return the values of its metrics.jsonl and of its exported weights."""
    run_dir = side.folder / "runs" / layout
    settings = [
        f"run.name={run_dir.name}",
        f"run.dir={run_dir.parent}",
        "run.seed=0",
        f"model.path={data}/model",
        f"data.train={data}/train-*.tar",
        f"data.eval={data}/eval-*.tar",
        f"train.steps={num_steps}",
        "rollout.deterministic=true",
        *LAYOUTS[layout],
    ]

    def where() -> str:
        num_records = len(_lines(run_dir / "metrics.jsonl"))
        return f", step {num_records - 1} of {num_steps}" if num_records else ", starting"

    command = [str(side.python), "-m", "yatt_mm.train", CONFIG, *settings]
    limit_s = START_LIMIT_S + num_steps * STEP_LIMIT_S
    _execute(side, command, f"{layout}, {side.name}", limit_s, console, where)
    values = values_of([json.loads(line) for line in _lines(run_dir / "metrics.jsonl")])
    for path in sorted((run_dir / "hf").glob("*.safetensors")):
        values[num_steps, f"hf/{path.name} (sha256)"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return values


def values_of(records: Sequence[dict[str, Any]]) -> Values:
    """Return every value that is compared, by step and key. Of a key in `LEFT_OUT` only the presence is compared, so
    that a key that only one side has is found."""
    values: Values = {}
    for record in records:
        for key, value in record.items():
            if LEFT_OUT.search(key):
                values[records[-1]["step"], key] = "present"
            else:
                values[record["step"], key] = repr(value)
    return values


def compare(old: Values, new: Values) -> dict[str, Any]:
    """Return how many values were compared, how many differ, and where the first difference is."""
    union = {**old, **new}
    places = [place for place in union if old.get(place) != new.get(place)]
    row: dict[str, Any] = {"num_values": sum(not LEFT_OUT.search(key) for _, key in union)}
    row["num_different"] = len(places)
    if places:
        first = min(places, key=lambda place: place[0])  # within a step, the first as the record has them
        row |= {"step": first[0], "key": first[1], "old": old.get(first, "missing"), "new": new.get(first, "missing")}
    return row


def show(rows: Sequence[dict[str, Any]], compared: Sequence[str], console: Console) -> None:
    """Print the table, and the keys that were compared."""
    table = Table("layout", "steps", "values compared", "different", "first difference")
    for row in rows:
        numbers = (str(row[name]) for name in ("layout", "num_steps", "num_values", "num_different"))
        first = "{key} in step {step}\nold {old}\nnew {new}".format(**row) if row["num_different"] else "none"
        table.add_row(*numbers, first)
    console.print(table)
    console.print(f"compared: {', '.join(compared)}", soft_wrap=True)
    console.print("left out: dataplane/*, placement/*, and all in seconds (_s) or bytes (_bytes)", soft_wrap=True)


def _execute(
    side: Side, command: list[str], what: str, limit_s: float, console: Console, where: Callable[[], str]
) -> None:
    """Run a command in the side's checkout to its end. Raises GuardError with the end of its log if it fails or takes
    too long."""
    log = side.folder / "log.txt"
    started = time.monotonic()
    with log.open("w") as file, console.status(what) as status:
        process = subprocess.Popen(
            command,
            cwd=side.checkout,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches only this file's process, which passes it on
        )
        try:
            while process.poll() is None and time.monotonic() - started < limit_s:
                status.update(f"{what}{where()}, {time.monotonic() - started:.0f} s")
                time.sleep(0.5)
        finally:
            if is_late := process.poll() is None:
                _stop(process)
    if is_late or process.returncode:
        fault = f"took more than {limit_s:g} s" if is_late else f"failed with exit status {process.returncode}"
        tail = "\n".join(_lines(log)[-NUM_TAIL_LINES:])
        raise GuardError(f"{what}{where()}, {fault}; the end of its log:\n{tail}")
    console.print(f"{what}: {time.monotonic() - started:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a run: it gets time to stop what it started, then its processes are killed."""
    process.terminate()
    try:
        process.wait(timeout=STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ask(folder: Path, *command: str) -> str:
    """Run a short command and return the last line that it prints."""
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise GuardError(f"{' '.join(command)} failed in {folder}: {done.stderr.strip()}")
    return (done.stdout.splitlines() or [""])[-1]


def environment() -> dict[str, str]:
    """Return the environment of a side's processes, in which no other packages are found before its own."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _interrupt(signum: int, frame: object) -> None:
    """End the comparison in good order. A second signal has no effect, so that everything is removed completely."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", metavar="OLD", help="a git revision: the commit before")
    parser.add_argument("new", metavar="NEW", help="a git revision: the commit after")
    parser.add_argument("--steps", type=int, default=10, help="training steps of each run (%(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="all by default")
    parser.add_argument("--data", type=Path, help="a folder that python -m examples.digits.prepare has made")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON object in the last line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
