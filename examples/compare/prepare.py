"""Makes everything that the compare example needs: `python -m examples.compare.prepare`. A second call does nothing.

It writes train-*.tar, eval-*.tar, model/ and, at the end, prepared.json, which says how the others were made. If
prepared.json is missing or says something else, everything is made again. Heavy imports wait until they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from examples import preparing

DEFAULT_DIRECTORY = Path(__file__).parent / "data"
VERSION = 1
"""The version of the files. Shards and model folders with another version are made again."""
TOKENIZER_TEXT = """assistant assistant user user system system
Compare the two digits. Compare the two digits. Answer with the larger one. Answer with the larger one.
Which digit is larger, or? Which digit is larger, or? 0, 1, 2, 3, 4, 5, 6, 7, 8 or 9.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(preparing.WarmedUp):
    """The content of prepared.json: how the files of the folder were made."""

    reading_accuracy: float
    """The share of held-out scans, 0 to 1, that the model could read after the first stage of its warm-up."""


def read_stamp(directory: Path, *, seed: int) -> Prepared | None:
    """Return what an earlier call made with this seed; None if there was no such call."""
    return preparing.read_stamp(directory, Prepared, version=VERSION, seed=seed)


def prepare(directory: Path, *, seed: int = 0, console: Console | None = None) -> Prepared:
    """Make shards and a warmed-up model folder in `directory`, and return how they were made. Files of an earlier call
    are replaced."""
    from transformers.utils import logging

    from examples.compare.data import make_split, write_shards
    from examples.compare.warmup import MAX_READING_STEPS, NUM_PAIR_STEPS, warm_up
    from examples.digits.model import build_model_folder

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    preparing.clear(directory)
    split = make_split(seed=seed)
    write_shards(directory, split)
    model_dir = directory / "model"
    build_model_folder(model_dir, seed=seed, text=TOKENIZER_TEXT)
    most = MAX_READING_STEPS + NUM_PAIR_STEPS
    with preparing.progress_bar("supervised warm-up", total=most, console=console) as show:

        def on_step(stage: str, step: int, accuracy: float) -> None:
            show(step, f"{stage}, step {step}, held-out accuracy {accuracy:.3f}")

        warmup = warm_up(model_dir, split, seed=seed, on_step=on_step)
    prepared = Prepared(
        version=VERSION,
        seed=seed,
        num_train=len(split.train),
        num_held_out=len(split.held_out),
        num_warmup_steps=warmup.num_steps,
        reading_accuracy=warmup.reading_accuracy,
        accuracy=warmup.accuracy,
    )
    preparing.write_stamp(directory, prepared)
    return prepared


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = preparing.command_line("compare", __doc__, out=DEFAULT_DIRECTORY)
    preparing.run_warmed_up(parser, arguments, read_stamp, prepare, noun="pairs")


if __name__ == "__main__":
    main()
