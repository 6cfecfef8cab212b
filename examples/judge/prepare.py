"""Makes the judge of the digits: `python -m examples.judge.prepare`. A second call does nothing.

It writes model/ and, at the end, prepared.json, which says how the model was made. The scans and the policy are those
of the digits example, which are made first if they are missing. Heavy imports wait until they are needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from examples import preparing
from examples.digits import prepare as digits

DEFAULT_DIRECTORY = Path(__file__).parent / "data"
VERSION = 2
"""The version of the files. A model folder with another version is made again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(preparing.Stamp):
    """The content of prepared.json: how the model was made."""

    num_steps: int
    reading_accuracy: float
    """The share of held-out scans that the judge could read before it learned to judge."""
    accuracy: float
    """The share of held-out pairs of a scan and an answer that it judges rightly; half of the answers are right."""


def read_stamp(directory: Path, *, seed: int) -> Prepared | None:
    """Return what an earlier call made with this seed; None if there was no such call."""
    return preparing.read_stamp(directory, Prepared, version=VERSION, seed=seed)


def prepare(directory: Path, *, seed: int = 0, console: Console | None = None) -> Prepared:
    """Make the judge's model folder in `directory`, and return how it was made. Files of an earlier call are
    replaced."""
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
    """Run the command line."""
    parser = preparing.command_line("judge", __doc__, out=DEFAULT_DIRECTORY)
    parser.add_argument(
        "--digits", type=Path, default=digits.DEFAULT_DIRECTORY, help="the digits' folder (%(default)s)"
    )
    options = parser.parse_args(arguments)
    console = Console()
    if digits.read_stamp(options.digits, seed=options.seed) is None:
        digits.main(["--out", str(options.digits), "--seed", str(options.seed)])
    prepared = preparing.find_or_make(options, read_stamp, prepare, console)
    console.print(
        f"model/ is right on {prepared.accuracy:.3f} of the held-out answers, half of them right, after "
        f"{prepared.num_steps} supervised steps"
    )


if __name__ == "__main__":
    main()
