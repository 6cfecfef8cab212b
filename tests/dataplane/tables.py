"""Tables like those of users: the columns of verl and Hugging Face, and JSON lines beside image files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
TURNS = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))


def verl_table(images: Sequence[Sequence[bytes | None]]) -> pa.Table:
    """Return a table with verl's columns: chat turns, a list of images, the name of the sample's set, and the data for
    the reward."""
    rows = range(len(images))
    turns = [[{"content": f"<image>What is in picture {row}?", "role": "user"}] for row in rows]
    cells = [[{"bytes": data, "path": None} for data in row] for row in images]
    return pa.table(
        {
            "data_source": pa.array(["geometry"] * len(images)),
            "prompt": pa.array(turns, TURNS),
            "images": pa.array(cells, pa.list_(IMAGE)),
            "reward_model": pa.array([{"ground_truth": str(row), "style": "rule"} for row in rows]),
            "extra_info": pa.array([{"index": row, "split": "train"} for row in rows]),
        }
    )


def hugging_face_table(images: Sequence[bytes | None]) -> pa.Table:
    """Return a table in Hugging Face's layout: one image column, a label, and the features as the library writes
    them."""
    features = {"image": {"_type": "Image"}, "label": {"names": ["no", "yes"], "_type": "ClassLabel"}}
    cells = pa.array([None if data is None else {"bytes": data, "path": "x.png"} for data in images], IMAGE)
    table = pa.table({"image": cells, "label": pa.array(range(len(images)), pa.int64())})
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write_parquet(path: Path, table: pa.Table, rows_per_group: int = 2) -> Path:
    """Write a Parquet file with small row groups."""
    pq.write_table(table, path, row_group_size=rows_per_group)
    return path


def write_lines(path: Path, rows: Sequence[Mapping[str, Any] | str]) -> Path:
    """Write a line for each row. Text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path
