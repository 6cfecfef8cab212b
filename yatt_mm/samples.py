"""The command `python -m yatt_mm.samples RUN`, which shows what the model said in a run: prompts, responses, rewards.

It reads the files `rollouts/step_<n>.parquet` of the run's folder (`yatt_mm.keeper.table`) and needs nothing else: the
run may be under way, finished, or dead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from yatt_mm.common.errors import ConfigError
from yatt_mm.common.terminal import put
from yatt_mm.keeper.table import FOLDER, Row, about, best_first, by_prompt, kept_steps, read_rows, table_path, verdicts
from yatt_mm.protocol.control import HELD_OUT, TRAIN
from yatt_mm.protocol.kept import SPLITS

EXAMPLES = """examples:
  python -m yatt_mm.samples runs/digits_cpu
  python -m yatt_mm.samples runs/digits_cpu --step 0 --split eval
  python -m yatt_mm.samples runs/digits_cpu --prompts 1 --responses 16
  python -m yatt_mm.samples runs/digits_cpu --pictures /tmp/pictures
  python -m yatt_mm.samples runs/compare_cpu --conversation --split train

The files have one row per response; pandas, DuckDB and other readers of Parquet open them as well.
"""


def main(arguments: list[str] | None = None, *, prog: str = "python -m yatt_mm.samples") -> int:
    """Run the command line and return the exit status.

    0: success; 2: there is nothing to show, and the error says why. `arguments`: None reads `sys.argv`. `prog`: the
    name of the command in its help.
    """
    options = _parser(prog).parse_args(arguments)
    try:
        step, rows = _read(Path(options.run), options.step, options.split, options.set)
        _show(Console(), step, rows, options)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _read(run: Path, step: int | None, split: str | None, of_set: str | None) -> tuple[int, list[Row]]:
    """Return (step, its rows). Raises ConfigError if there are none."""
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; give the folder of a run, such as runs/digits_cpu")
    steps = kept_steps(run)
    if not steps:
        raise ConfigError(
            f"{run / FOLDER} has no step_<n>.parquet: the run has not come to its first evaluation, or it was started "
            "with rollouts.keep=none"
        )
    if step is not None and step not in steps:
        raise ConfigError(f"{run} kept nothing of step {step}; it has the steps {_ranges(steps)}")
    step = steps[-1] if step is None else step
    path = table_path(run, step)
    try:
        rows = [row for row in read_rows(path) if split in (None, row["split"])]
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path} is no file of rollouts: {error}") from error
    if not rows:
        raise ConfigError(f"{path} has no rows of the split {split}; leave --split out, or choose another step")
    sets = sorted({row.get("set") or "" for row in rows})
    if of_set is not None and of_set not in sets:
        raise ConfigError(f"{path} has no rows of the set {of_set}; it has {', '.join(sets)}")
    return step, [row for row in rows if of_set in (None, row.get("set"))]


def _show(console: Console, step: int, rows: Sequence[Row], options: argparse.Namespace) -> None:
    for split in SPLITS:
        prompts = by_prompt(rows, split)
        for number, responses in enumerate(prompts[: options.prompts], 1):
            first = responses[0]
            of_set = "" if first.get("set") in (None, TRAIN, HELD_OUT) else f" of {first['set']}"
            console.rule(f"step {step}, {split}, sample {first['index']}{of_set}")
            turns = json.loads(first.get("conversation") or "[]") if options.conversation else []
            for turn in turns or [{"role": "question", "content": first["question"]}]:
                put(console, turn["role"], _text_of(turn["content"]))
            put(console, "answer", first["answer"])
            for place, medium in enumerate(first["media"]):
                shown = f"{medium['kind']} {medium['source']}"
                if options.pictures and medium["thumbnail"]:
                    name = f"step_{step}_{split}_{number}_{place}.jpg"
                    shown = str(_save(Path(options.pictures) / name, medium["thumbnail"]))
                put(console, "media", shown)
            for row in _some(responses, options.responses):
                _response(console, row)
            if len(responses) > options.responses:
                console.print(f"[dim]{len(responses) - options.responses} more responses (--responses)[/]")
        if len(prompts) > options.prompts:
            console.print(f"[dim]{len(prompts) - options.prompts} more prompts of {split} (--prompts)[/]")


def _response(console: Console, row: Row) -> None:
    console.print(Text(about(row), style="bold"))
    put(console, "", row["response"])
    for name, words in verdicts(row):
        put(console, name, words)


def _text_of(content: str | list[dict[str, str]]) -> str:
    """Return what a turn says, with `<image>` and `<video>` where its media stand."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def _some(responses: Sequence[Row], most: int) -> list[Row]:
    """Return responses from the best to the worst; if there are too many, without those in the middle."""
    ranked, num_worst = best_first(responses), most // 2
    return ranked if len(ranked) <= most else ranked[: most - num_worst] + ranked[len(ranked) - num_worst :]


def _save(path: Path, picture: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(picture)
    return path


def _ranges(steps: Sequence[int]) -> str:
    """Return sorted numbers in short: 0 to 4, 6."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a whole number of at least 1")
    return int(text)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Show what the model said in a run: prompts, responses from the best to the worst, rewards.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the folder of a run, such as runs/digits_cpu")
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the newest); 0 is before training")
    parser.add_argument("--split", choices=SPLITS, help="only the responses for training, or those to held-out samples")
    parser.add_argument("--set", metavar="NAME", help="only the samples of this set")
    parser.add_argument(
        "--conversation",
        action="store_true",
        help="show all turns that the model read, with the system prompt and the template, instead of the question",
    )
    parser.add_argument("--prompts", type=_count, default=4, metavar="N", help="the most prompts of each split (4)")
    parser.add_argument("--responses", type=_count, default=4, metavar="N", help="the most responses of a prompt (4)")
    parser.add_argument("--pictures", metavar="FOLDER", help="write the pictures of the media there, as JPEG files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
