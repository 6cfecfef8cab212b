"""What TensorBoard shows of a run: the metrics as curves, and what the model said as text beside its pictures."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_BLOB_SEQUENCE, DATA_CLASS_SCALAR, DATA_CLASS_TENSOR
from tensorboard.plugins.image.metadata import create_summary_metadata as image_metadata
from tensorboard.plugins.scalar.metadata import create_summary_metadata as scalar_metadata
from tensorboard.plugins.text.metadata import create_summary_metadata as text_metadata
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util import tensor_util

from yatt_mm.common.writing import writing
from yatt_mm.keeper.table import Row, about, best_first, by_prompt, verdicts
from yatt_mm.protocol.kept import SPLITS

MAX_CHARS = 2000
"""The number of characters of a question or response that are shown."""


class TensorboardFile:
    """The event file of one run in a folder. It is written by the thread that calls, so that an error is raised there.

    All methods raise DiskError if the file cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
            self._records = RecordWriter(self._file)
            self._records.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def add_metrics(self, record: Mapping[str, float]) -> None:
        """Add the metrics of a step."""
        for name, value in record.items():
            if name != "step":
                self._add(record["step"], name, np.float32(value), scalar_metadata(name, ""), DATA_CLASS_SCALAR)
        self._flush()

    def add_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Add what the model said to some prompts of a step (rows of `yatt_mm.keeper.table`), as text and pictures."""
        for split in SPLITS:
            prompts = by_prompt(rows, split)
            if not prompts:
                continue
            text = "\n\n".join(_text(number, responses) for number, responses in enumerate(prompts, 1))
            data = np.array([text.encode()], dtype=object)
            self._add(step, f"rollouts/{split}", data, text_metadata(f"rollouts/{split}", ""), DATA_CLASS_TENSOR)
            for number, responses in enumerate(prompts, 1):
                pictures = [medium["thumbnail"] for medium in responses[0]["media"] if medium["thumbnail"]]
                if pictures:
                    name = f"rollouts/{split} prompt {number}"
                    self._add(step, name, _images(pictures), image_metadata(name, ""), DATA_CLASS_BLOB_SEQUENCE)
        self._flush()

    def close(self) -> None:
        """Write everything, and close the file."""
        with writing(self._path):
            self._file.close()

    def _add(self, step: float, name: str, data: Any, metadata: Any, data_class: Any) -> None:
        event = Event(wall_time=time.time(), step=int(step))
        metadata.data_class = data_class
        event.summary.value.add(tag=name, tensor=tensor_util.make_tensor_proto(data), metadata=metadata)
        with writing(self._path):
            self._records.write(event.SerializeToString())

    def _flush(self) -> None:
        with writing(self._path):
            self._file.flush()


def _text(number: int, responses: Sequence[Row]) -> str:
    """Return a prompt with its responses, the best first, as Markdown."""
    first = responses[0]
    head = [
        f"### prompt {number} (sample {first['index']})",
        _block(first["question"]),
        "answer:",
        _block(first["answer"]),
    ]
    return "\n\n".join([*head, *map(_response, best_first(responses))])


def _response(row: Row) -> str:
    said = (part for name, words in verdicts(row) for part in (f"{name}:", _block(words)))
    return "\n\n".join([f"**{about(row)}**", _block(row["response"]), *said])


def _block(text: str) -> str:
    """Return a text as a block of code, in which Markdown changes nothing."""
    shown = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]} [...]"
    return "\n".join(f"    {line}" for line in shown.splitlines() or [""])


def _images(pictures: Sequence[bytes]) -> np.ndarray:
    """Return pictures in the form of TensorBoard's images: width, height, files."""
    width, height = Image.open(io.BytesIO(pictures[0])).size
    return np.array([str(width).encode(), str(height).encode(), *pictures], dtype=object)
