"""Makes everything that the motion example needs: `python -m examples.motion.prepare`. A second call does nothing.

Writes train-*.tar, eval-*.tar, model/ and, last, prepared.json, which says what the others were made with; without
it, or when it says something else, all is made again. Heavy imports wait until there is something to make.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

DEFAULT_DIRECTORY = Path(__file__).parent / "data"
STAMP_NAME = "prepared.json"
VERSION = 1
"""Counts changes to what is made: shards or model folders with another number are made again."""
TOKENIZER_TEXT = """left
right
up
down
left
right
up
down
assistant assistant user user system system
Which way does it go? Which way does the digit go? Say left, right, up or down.
"""
"""Each direction is one token at the beginning of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What lies in the folder."""

    version: int
    seed: int
    num_train: int
    num_held_out: int
    num_warmup_steps: int
    accuracy: float
    """Held-out greedy accuracy of the model folder, before reinforcement learning."""


def read_stamp(directory: Path, *, seed: int) -> Prepared | None:
    """What an earlier call made with this seed and this version of the example; None when there is no such thing."""
    path = directory / STAMP_NAME
    if not path.is_file():
        return None
    try:
        prepared = Prepared(**json.loads(path.read_text()))
    except (TypeError, ValueError):  # of another version, or cut off: make it again
        return None
    return prepared if (prepared.version, prepared.seed) == (VERSION, seed) else None


def prepare(directory: Path, *, seed: int = 0, console: Console | None = None) -> Prepared:
    """Make shards and a warmed-up model folder in `directory`, over whatever an earlier call left there."""
    from transformers.utils import logging

    from examples.digits.model import build_model_folder
    from examples.motion.data import make_split, write_shards
    from examples.motion.warmup import TARGET_ACCURACY, warm_up

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    _clear(directory)
    split = make_split(seed=seed)
    write_shards(directory, split)
    model_dir = directory / "model"
    build_model_folder(model_dir, seed=seed, text=TOKENIZER_TEXT)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("supervised warm-up", total=TARGET_ACCURACY)

        def show(step: int, accuracy: float) -> None:
            description = f"supervised warm-up: step {step}, held-out accuracy {accuracy:.3f}"
            progress.update(task, completed=accuracy, description=description)

        warmup = warm_up(model_dir, split, seed=seed, on_step=show)
    prepared = Prepared(
        version=VERSION,
        seed=seed,
        num_train=len(split.train),
        num_held_out=len(split.held_out),
        num_warmup_steps=warmup.num_steps,
        accuracy=warmup.accuracy,
    )
    (directory / STAMP_NAME).write_text(json.dumps(asdict(prepared), indent=2) + "\n")
    return prepared


def _clear(directory: Path) -> None:
    """Remove what an earlier call made, the stamp first; other files stay."""
    (directory / STAMP_NAME).unlink(missing_ok=True)
    for pattern in ("train-*.tar", "eval-*.tar"):
        for path in directory.glob(pattern):
            path.unlink()
    shutil.rmtree(directory / "model", ignore_errors=True)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.motion.prepare", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_DIRECTORY, help="folder to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides the clips and the weights (%(default)s)")
    parser.add_argument("--force", action="store_true", help="make everything again")
    options = parser.parse_args(arguments)
    console = Console()
    start = time.monotonic()
    prepared = None if options.force else read_stamp(options.out, seed=options.seed)
    if prepared is not None:
        console.print(f"{options.out} is already prepared (seed {options.seed}); --force makes it again")
    else:
        prepared = prepare(options.out, seed=options.seed, console=console)
        console.print(f"prepared {options.out} in {time.monotonic() - start:.1f} s")
    console.print(
        f"{prepared.num_train} train and {prepared.num_held_out} held-out clips; model/ answers "
        f"{prepared.accuracy:.3f} of the held-out ones after {prepared.num_warmup_steps} supervised steps"
    )


if __name__ == "__main__":
    main()
