"""The safetensors files of a Hugging Face folder: what they hold, reading one tensor, writing the same files again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files beside the weights that make a folder loadable by transformers and vLLM; those that exist are copied."""


class CheckpointFiles:
    """Read access by tensor name; files are opened once and mapped."""

    def __init__(self, model_dir: Path) -> None:
        """Raises FileNotFoundError where the folder holds no safetensors checkpoint."""
        self.model_dir = model_dir
        self.file_of = _files_by_tensor(model_dir)
        self._open: dict[str, safe_open] = {}

    @property
    def names(self) -> list[str]:
        """Every tensor of the checkpoint."""
        return list(self.file_of)

    def read(self, name: str) -> torch.Tensor:
        """One full tensor. Raises ValueError where the checkpoint has none of that name."""
        return self._file_with(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return tuple(self._file_with(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the checkpoint keeps a tensor."""
        first = self._file_with(name).get_slice(name)
        return torch.empty(0, dtype=_DTYPES[first.get_dtype()]).dtype

    def write_like(self, directory: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a folder of the same files: names, dtypes, shards and companions as here, values from `tensors`.

        All of `tensors` is taken before anything is written. The folder appears whole or not at all: an older one in
        its place is replaced when the new one is complete.
        """
        contents: dict[str, dict[str, torch.Tensor]] = {file: {} for file in self.file_of.values()}
        for name, tensor in tensors:
            contents[self.file_of[name]][name] = tensor.detach().to("cpu", self.dtype(name), copy=True).contiguous()
        missing = set(self.file_of) - {name for tensors_of_file in contents.values() for name in tensors_of_file}
        if missing:
            raise ValueError(
                f"the checkpoint at {self.model_dir} holds {sorted(missing)[:3]} and {len(missing)} such tensors in "
                "all, which the model does not have; remove them from the folder"
            )
        with _replaced_whole(directory) as partial:
            for file, tensors_of_file in contents.items():
                save_file(tensors_of_file, partial / file, metadata={"format": "pt"})
            for companion in (INDEX, *COMPANIONS):
                if (self.model_dir / companion).is_file():
                    shutil.copyfile(self.model_dir / companion, partial / companion)

    def _file_with(self, name: str) -> safe_open:
        if name not in self.file_of:
            raise ValueError(
                f"no tensor {name} in the checkpoint at {self.model_dir}; its config.json and weights do not belong "
                "together, so choose a complete model folder"
            )
        file = self.file_of[name]
        if file not in self._open:
            self._open[file] = safe_open(self.model_dir / file, "pt")
        return self._open[file]


@contextmanager
def _replaced_whole(directory: Path) -> Iterator[Path]:
    """An empty folder beside `directory` that takes its place at the end; what an earlier end left is removed."""
    partial, old = (directory.with_name(f".{directory.name}.{state}") for state in ("partial", "old"))
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    yield partial
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def _files_by_tensor(model_dir: Path) -> dict[str, str]:
    if (model_dir / INDEX).is_file():
        weight_map: dict[str, str] = json.loads((model_dir / INDEX).read_text())["weight_map"]
        return weight_map
    if not (model_dir / SINGLE).is_file():
        raise FileNotFoundError(
            f"neither {SINGLE} nor {INDEX} in {model_dir}; model.path must name a folder with safetensors weights"
        )
    with safe_open(model_dir / SINGLE, "pt") as file:
        return dict.fromkeys(file.keys(), SINGLE)


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
