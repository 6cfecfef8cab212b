"""The code that the examples' `prepare` modules share: the stamp of a folder, a progress bar, the command line.

Nothing heavy is imported here: a second call of a `prepare` only reads its stamp.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STAMP_NAME = "prepared.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """The stamp of a folder: how its files were made. Examples add fields."""

    version: int
    """The version of the example. Data of another version is made again."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedUp(Stamp):
    """The stamp of a folder with shards and a model that a warm-up taught."""

    num_train: int
    num_held_out: int
    num_warmup_steps: int
    accuracy: float
    """The model folder's held-out greedy accuracy, 0 to 1, before reinforcement learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """The result of a warm-up."""

    num_steps: int
    accuracy: float
    """The held-out greedy accuracy of the saved model, 0 to 1: the right answer, then <|im_end|>."""


class WarmupError(RuntimeError):
    """A warm-up did not bring the model into the wanted range of accuracies."""


S = TypeVar("S", bound=Stamp)
W = TypeVar("W", bound=WarmedUp)


def read_stamp(directory: Path, kind: type[S], *, version: int, seed: int) -> S | None:
    """Return the stamp that an earlier call wrote with this seed and this version of the example; None if there is
    none."""
    path = directory / STAMP_NAME
    if not path.is_file():
        return None
    try:
        stamp = kind(**json.loads(path.read_text()))
    except (TypeError, ValueError):  # of another version, or cut off: make it again
        return None
    return stamp if (stamp.version, stamp.seed) == (version, seed) else None


def write_stamp(directory: Path, stamp: Stamp) -> None:
    """Write the stamp. This is the last file, so a folder with a stamp is complete."""
    (directory / STAMP_NAME).write_text(json.dumps(asdict(stamp), indent=2) + "\n")


def clear(directory: Path) -> None:
    """Make the folder, or remove what an earlier call made in it, the stamp first. Other files stay."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / STAMP_NAME).unlink(missing_ok=True)
    for pattern in ("train-*.tar", "eval-*.tar"):
        for path in directory.glob(pattern):
            path.unlink()
    shutil.rmtree(directory / "model", ignore_errors=True)


@contextmanager
def progress_bar(what: str, *, total: float, console: Console | None) -> Iterator[Callable[[float, str], None]]:
    """Show a progress bar during a `with` block, which gets a function to call with the number done and a text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda completed, where: progress.update(task, completed=completed, description=f"{what}: {where}")


def command_line(name: str, doc: str | None, *, out: Path) -> argparse.ArgumentParser:
    """Return the parser with the arguments that all examples take. `name` is the name of the example."""
    parser = argparse.ArgumentParser(prog=f"python -m examples.{name}.prepare", description=doc)
    parser.add_argument("--out", type=Path, default=out, help="folder to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides the data and the weights (%(default)s)")
    parser.add_argument("--force", action="store_true", help="make everything again")
    return parser


def find_or_make(
    options: argparse.Namespace, find: Callable[..., S | None], make: Callable[..., S], console: Console
) -> S:
    """Return the folder's stamp: the record of how its files were made. Its files are made now if they are missing, or
    if the options say so. `find`, `make`: `read_stamp` and `prepare` of an example."""
    start = time.monotonic()
    stamp = None if options.force else find(options.out, seed=options.seed)
    if stamp is not None:
        console.print(f"{options.out} is already prepared (seed {options.seed}); --force makes it again")
        return stamp
    stamp = make(options.out, seed=options.seed, console=console)
    console.print(f"prepared {options.out} in {time.monotonic() - start:.1f} s")
    return stamp


def run_warmed_up(
    parser: argparse.ArgumentParser,
    arguments: list[str] | None,
    find: Callable[..., W | None],
    make: Callable[..., W],
    *,
    noun: str,
) -> None:
    """Run the command line of an example with a warm-up. `noun`: what a sample is called, such as `clips`."""
    console = Console()
    prepared = find_or_make(parser.parse_args(arguments), find, make, console)
    console.print(
        f"{prepared.num_train} train and {prepared.num_held_out} held-out {noun}; model/ answers "
        f"{prepared.accuracy:.3f} of the held-out ones after {prepared.num_warmup_steps} supervised steps"
    )
