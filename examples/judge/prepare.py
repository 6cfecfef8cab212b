"""Makes the judge of the digits: `python -m examples.judge.prepare`. A second call does nothing.

Writes model/ and, last, prepared.json, which says what it was made with. The scans and the policy are the digits
example's, which are made first where they are missing. Heavy imports wait until there is something to make.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from examples import preparing
from examples.digits import prepare as digits

DEFAULT_DIRECTORY = Path(__file__).parent / "data"
VERSION = 1
"""Counts changes to what is made: a model folder with another number is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(preparing.Stamp):
    """What lies in the folder."""

    num_steps: int
    reading_accuracy: float
    """Held-out scans that it could read before it learned to judge."""
    accuracy: float
    """Held-out pairs of a scan and an answer that it judges rightly; half of the answers are right."""


def read_stamp(directory: Path, *, seed: int) -> Prepared | None:
    """What an earlier call made with this seed; None when there is no such thing."""
    return preparing.read_stamp(directory, Prepared, version=VERSION, seed=seed)


def prepare(directory: Path, *, seed: int = 0, console: Console | None = None) -> Prepared:
    """Make the judge's model folder in `directory`, over whatever an earlier call left there."""
    from transformers.utils import logging

    from examples.digits.data import make_split
    from examples.digits.model import TOKENIZER_TEXT, build_model_folder
    from examples.judge import lessons
    from examples.judge.teaching import NUM_JUDGING_STEPS, NUM_READING_STEPS, teach

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    preparing.clear(directory)
    model_dir = directory / "model"
    build_model_folder(model_dir, seed=seed, text=TOKENIZER_TEXT + lessons.TOKENIZER_TEXT)
    num_steps = NUM_READING_STEPS + NUM_JUDGING_STEPS
    with preparing.progress_bar("teaching the judge", total=num_steps, console=console) as show:

        def on_step(stage: str, step: int, accuracy: float) -> None:
            show(step, f"{stage}, held-out accuracy {accuracy:.3f}")

        taught = teach(model_dir, make_split(seed=seed), seed=seed, on_step=on_step)
    prepared = Prepared(version=VERSION, seed=seed, **asdict(taught))
    preparing.write_stamp(directory, prepared)
    return prepared


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = preparing.command_line("judge", __doc__, out=DEFAULT_DIRECTORY)
    parser.add_argument(
        "--digits", type=Path, default=digits.DEFAULT_DIRECTORY, help="the digits' folder (%(default)s)"
    )
    options = parser.parse_args(arguments)
    console = Console()
    if digits.read_stamp(options.digits, seed=options.seed) is None:
        digits.main(["--out", str(options.digits), "--seed", str(options.seed)])
    prepared = preparing.find_or_make(
        options,
        lambda out, seed: read_stamp(out, seed=seed),
        lambda out, seed: prepare(out, seed=seed, console=console),
        console,
    )
    console.print(
        f"model/ is right on {prepared.accuracy:.3f} of the held-out answers, half of them right, after "
        f"{prepared.num_steps} supervised steps"
    )


if __name__ == "__main__":
    main()
