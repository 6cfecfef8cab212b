"""The files `rollouts/step_<n>.parquet` of a run: one row per response, with its reward and pictures of its media.

Any reader of Parquet can open them. A picture is stored once per file, however many rows show it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from yatt_mm.protocol.faults import FUNCTION
from yatt_mm.protocol.kept import SPLITS, Split

FOLDER = "rollouts"
"""The folder inside a run's folder."""
PICTURES_BYTES = 64 << 20
"""The size of the list of distinct pictures, up to which each is stored once."""

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("split", pa.string()),
        ("position", pa.int64()),  # of the prompt in the run's order; of the sample in the held-out set
        ("epoch", pa.int32()),
        ("set", pa.string()),  # the name of the data set in the config
        ("index", pa.int64()),  # of the sample in its data set
        ("place", pa.int32()),  # of the response in its group
        ("question", pa.string()),
        ("conversation", pa.string()),  # what the policy read: turns for a chat template, as JSON
        ("answer", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("advantage", pa.float64()),  # null if the step did not train on the group
        ("scores", pa.list_(pa.struct([("source", pa.string()), ("score", pa.float64()), ("words", pa.string())]))),
        ("parts", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))),  # of the reward function
        ("read_answer", pa.string()),  # what the reward function read in the response; null if it does not say
        ("finish_reason", pa.string()),
        ("num_tokens", pa.int32()),
        ("token_ids", pa.list_(pa.int64())),
        ("logprob_mean", pa.float64()),  # of the engine; null without tokens
        ("logprob_min", pa.float64()),
        ("policy_version_min", pa.int64()),
        ("policy_version_max", pa.int64()),
        ("media", pa.list_(pa.struct([("kind", pa.string()), ("source", pa.string()), ("thumbnail", pa.binary())]))),
    ],
    metadata={"format": "yatt_mm.rollouts.1"},
)


Row = dict[str, Any]
"""One response, as a dictionary of the columns."""


def table_path(run_dir: Path, step: int) -> Path:
    """Return the path of the file of a step."""
    return run_dir / FOLDER / f"step_{step}.parquet"


def kept_steps(run_dir: Path) -> list[int]:
    """Return the steps of which a run's folder has a file, in order."""
    names = (re.fullmatch(r"step_(\d+)\.parquet", path.name) for path in (run_dir / FOLDER).glob("step_*.parquet"))
    return sorted(int(name[1]) for name in names if name)


def drop_after(run_dir: Path, step: int) -> None:
    """Remove the files of later steps, which a run that is resumed will write again."""
    for later in kept_steps(run_dir):
        if later > step:
            table_path(run_dir, later).unlink()


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the file of a step, in place of an earlier one. Raises OSError, and then leaves no half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        pq.write_table(
            pa.Table.from_pylist(list(rows), schema=SCHEMA),
            partial,
            compression="zstd",
            dictionary_pagesize_limit=PICTURES_BYTES,
            write_statistics=False,
        )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def read_rows(path: Path, *, max_prompts: int | None = None) -> list[Row]:
    """Return the rows of a file: all of them, or those of the first `max_prompts` prompts of each split without their
    token ids. Raises OSError if there is no file, and pyarrow.ArrowInvalid if it is of another kind."""
    columns = None if max_prompts is None else [name for name in SCHEMA.names if name != "token_ids"]
    table = pq.read_table(path, columns=columns)
    if max_prompts is not None:
        prompts = list(zip(table["split"].to_pylist(), table["position"].to_pylist()))
        of_split = (dict.fromkeys(prompt for prompt in prompts if prompt[0] == split) for split in SPLITS)
        wanted = {prompt for distinct in of_split for prompt in list(distinct)[:max_prompts]}
        table = table.take([at for at, prompt in enumerate(prompts) if prompt in wanted])
    rows: list[Row] = table.to_pylist()
    return rows


def best_first(rows: Sequence[Row]) -> list[Row]:
    """Return rows from the highest reward to the lowest."""
    return sorted(rows, key=lambda row: -row["reward"])


def about(row: Row) -> str:
    """Return in a line what is known of a response: reward, advantage, tokens and why it ended."""
    parts = [f"reward {row['reward']:.3f}"]
    if row["advantage"] is not None:
        parts.append(f"advantage {row['advantage']:+.3f}")
    elif row["split"] == "train":
        parts.append("not trained on")
    parts += [f"{row['num_tokens']} tokens", row["finish_reason"]]
    if row["logprob_mean"] is not None:
        parts.append(f"mean log-probability {row['logprob_mean']:.3f}")
    return "  ".join(parts)


def verdicts(row: Row) -> list[tuple[str, str]]:
    """Return what a reward is made of, if it is of several scores or has parts: (source and score, what the judge wrote
    or which parts the function gave)."""
    parts = "  ".join(f"{part['name']} {part['value']:.3f}" for part in row.get("parts") or ())
    scores = row["scores"] if len(row["scores"]) > 1 or parts else ()
    return [
        (
            f"{scored['source']} {scored['score']:.3f}",
            scored["words"] or (parts if scored["source"] == FUNCTION else ""),
        )
        for scored in scores
    ]


def by_prompt(rows: Sequence[Row], split: Split) -> list[list[Row]]:
    """Return the rows of each prompt of a split, in the order of the file."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if row["split"] == split:
            groups.setdefault(row["position"], []).append(row)
    return list(groups.values())
