"""Makes everything that the motion example needs: `python -m examples.motion.prepare`. A second call does nothing.

It writes train-*.tar, eval-*.tar, model/ and, at the end, prepared.json, which says how the others were made. If
prepared.json is missing or says something else, everything is made again. Heavy imports wait until they are needed.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from examples import preparing
from examples.preparing import WarmedUp

DEFAULT_DIRECTORY = Path(__file__).parent / "data"
VERSION = 1
"""The version of the files. Shards and model folders with another version are made again."""
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
"""The text that makes the tokenizer learn one token for each direction at the beginning of an answer."""


def read_stamp(directory: Path, *, seed: int) -> WarmedUp | None:
    """Return what an earlier call made with this seed; None if there was no such call."""
    return preparing.read_stamp(directory, WarmedUp, version=VERSION, seed=seed)


def prepare(directory: Path, *, seed: int = 0, console: Console | None = None) -> WarmedUp:
    """Make shards and a warmed-up model folder in `directory`, and return how they were made. Files of an earlier call
    are replaced."""
    from transformers.utils import logging

    from examples.digits.model import build_model_folder
    from examples.motion.data import make_split, write_shards
    from examples.motion.warmup import TARGET_ACCURACY, warm_up

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    preparing.clear(directory)
    split = make_split(seed=seed)
    write_shards(directory, split)
    model_dir = directory / "model"
    build_model_folder(model_dir, seed=seed, text=TOKENIZER_TEXT)
    with preparing.progress_bar("supervised warm-up", total=TARGET_ACCURACY, console=console) as show:

        def on_step(step: int, accuracy: float) -> None:
            show(accuracy, f"step {step}, held-out accuracy {accuracy:.3f}")

        warmup = warm_up(model_dir, split, seed=seed, on_step=on_step)
    prepared = WarmedUp(
        version=VERSION,
        seed=seed,
        num_train=len(split.train),
        num_held_out=len(split.held_out),
        num_warmup_steps=warmup.num_steps,
        accuracy=warmup.accuracy,
    )
    preparing.write_stamp(directory, prepared)
    return prepared


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = preparing.command_line("motion", __doc__, out=DEFAULT_DIRECTORY)
    preparing.run_warmed_up(parser, arguments, read_stamp, prepare, noun="clips")


if __name__ == "__main__":
    main()
