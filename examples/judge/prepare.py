"""Makes the judge of the digits: `python -m examples.judge.prepare`. A second call does nothing.

Writes model/ and, last, prepared.json, which says what it was made with. The scans and the policy are the digits
example's, which are made first where they are missing. Heavy imports wait until there is something to make.
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

from examples.digits import prepare as digits

DEFAULT_DIRECTORY = Path(__file__).parent / "data"
STAMP_NAME = "prepared.json"
VERSION = 1
"""Counts changes to what is made: a model folder with another number is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What lies in the folder."""

    version: int
    seed: int
    num_steps: int
    reading_accuracy: float
    """Held-out scans that it could read before it learned to judge."""
    accuracy: float
    """Held-out pairs of a scan and an answer that it judges rightly; half of the answers are right."""


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
    """Make the judge's model folder in `directory`, over whatever an earlier call left there."""
    from transformers.utils import logging

    from examples.digits.data import make_split
    from examples.digits.model import TOKENIZER_TEXT, build_model_folder
    from examples.judge import lessons
    from examples.judge.teaching import NUM_JUDGING_STEPS, NUM_READING_STEPS, teach

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / STAMP_NAME).unlink(missing_ok=True)
    model_dir = directory / "model"
    shutil.rmtree(model_dir, ignore_errors=True)
    build_model_folder(model_dir, seed=seed, text=TOKENIZER_TEXT + lessons.TOKENIZER_TEXT)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("teaching the judge", total=NUM_READING_STEPS + NUM_JUDGING_STEPS)

        def show(stage: str, num_steps: int, accuracy: float) -> None:
            description = f"teaching the judge: {stage}, held-out accuracy {accuracy:.3f}"
            progress.update(task, completed=num_steps, description=description)

        taught = teach(model_dir, make_split(seed=seed), seed=seed, on_step=show)
    prepared = Prepared(version=VERSION, seed=seed, **asdict(taught))
    (directory / STAMP_NAME).write_text(json.dumps(asdict(prepared), indent=2) + "\n")
    return prepared


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.judge.prepare", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_DIRECTORY, help="folder to write (%(default)s)")
    parser.add_argument(
        "--digits", type=Path, default=digits.DEFAULT_DIRECTORY, help="the digits' folder (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides the split and the weights (%(default)s)")
    parser.add_argument("--force", action="store_true", help="make the judge again")
    options = parser.parse_args(arguments)
    console = Console()
    if digits.read_stamp(options.digits, seed=options.seed) is None:
        digits.main(["--out", str(options.digits), "--seed", str(options.seed)])
    start = time.monotonic()
    prepared = None if options.force else read_stamp(options.out, seed=options.seed)
    if prepared is not None:
        console.print(f"{options.out} is already prepared (seed {options.seed}); --force makes it again")
    else:
        prepared = prepare(options.out, seed=options.seed, console=console)
        console.print(f"prepared {options.out} in {time.monotonic() - start:.1f} s")
    console.print(
        f"model/ is right on {prepared.accuracy:.3f} of the held-out answers, half of them right, after "
        f"{prepared.num_steps} supervised steps"
    )


if __name__ == "__main__":
    main()
