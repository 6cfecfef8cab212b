"""The safetensors files of a Hugging Face folder: their tensors, reading one tensor, and writing the same files
again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from models.weights.safetensors_header import LENGTH_BYTES, read_header

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
"""Files next to the weights that transformers and vLLM need to load a folder. Those that exist are copied."""


class CheckpointFiles:
    """Reads the tensors of a Hugging Face folder by name. Files are opened once and mapped."""

    def __init__(self, model_dir: Path) -> None:
        """Open the checkpoint. Raises FileNotFoundError if the folder has no safetensors files."""
        self.model_dir = model_dir
        self.file_of = _files_by_tensor(model_dir)
        self._open: dict[str, safe_open] = {}

    @property
    def names(self) -> list[str]:
        """Every tensor name of the checkpoint."""
        return list(self.file_of)

    def read(self, name: str) -> torch.Tensor:
        """Return one full tensor. Raises ValueError if the checkpoint has none of that name."""
        return self._file_with(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return tuple(self._file_with(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which the checkpoint keeps a tensor."""
        first = self._file_with(name).get_slice(name)
        return torch.empty(0, dtype=_DTYPES[first.get_dtype()]).dtype

    def write_like(
        self,
        directory: Path,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        also: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Write a folder with the same files: names, shapes, dtypes, shards and companions are those of this
        checkpoint, and the values come from `tensors`.

        Each tensor is written when `tensors` yields it, so one at a time is in memory. An older folder is replaced only
        when the new one is complete; `also` writes more into it before that. If writing fails, `tensors` is still read
        to its end, because other ranks take part in giving them.
        """
        coming = iter(tensors)
        try:
            with _replaced_whole(directory) as partial:
                self._write_each(partial, coming)
                for companion in (INDEX, *COMPANIONS):
                    if (self.model_dir / companion).is_file():
                        shutil.copyfile(self.model_dir / companion, partial / companion)
                also(partial)
        except Exception:
            for _ in coming:
                pass
            raise

    def _write_each(self, directory: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        missing = set(self.file_of)
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(_SameLayout(self.model_dir / name, directory / name))
                for name in sorted(set(self.file_of.values()))
            }
            for name, tensor in tensors:
                files[self.file_of[name]].write(name, tensor.detach().to("cpu", self.dtype(name), copy=True))
                missing.discard(name)
        if missing:
            raise ValueError(
                f"the checkpoint at {self.model_dir} holds {sorted(missing)[:3]} and {len(missing)} such tensors in "
                "all, which the model does not have; remove them from the folder"
            )

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


class _SameLayout:
    """A safetensors file with the header of another file. Its tensors may be written in any order."""

    def __init__(self, like: Path, path: Path) -> None:
        header = read_header(like)
        self._entries = json.loads(header)
        self._begin = LENGTH_BYTES + len(header)
        self._file = path.open("wb")
        self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        self._file.truncate(like.stat().st_size)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, with the shape and dtype of the header."""
        wanted = self._entries[name]["shape"]
        if list(tensor.shape) != wanted:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but the model's folder keeps {wanted}")
        self._file.seek(self._begin + self._entries[name]["data_offsets"][0])
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._file.flush()

    def __enter__(self) -> _SameLayout:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


@contextmanager
def _replaced_whole(directory: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `directory` at the end. The remains of an earlier failure are removed
    first."""
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
    single = model_dir / SINGLE
    names = [SINGLE] if single.is_file() else sorted(path.name for path in model_dir.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"no .safetensors file in {model_dir}; wanted a folder with safetensors weights")
    files: dict[str, str] = {}
    for name in names:
        with safe_open(model_dir / name, "pt") as file:
            files |= dict.fromkeys(file.keys(), name)
    return files


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
