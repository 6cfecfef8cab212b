"""Repairs or hides CUDA builds of torchvision, torchaudio and torchcodec beside a CPU torch.

Package indexes often have only CUDA builds, whose libraries cannot be loaded here. The Python part of torchvision works
alone once the schemas of two operators exist; its own registration of their fake kernels fails without them
(pytorch/vision#9077). The other two packages are not needed, but transformers and vLLM use them if they can be
imported, so they are hidden.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import mmap
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")
CUDA_LIBRARIES = (b"libc10_cuda.so", b"libtorch_cuda.so", b"libcudart.so")
NMS_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

_defined_schemas: list[Any] = []
"""The operator libraries with the missing schemas. They are kept for the life of the process, because garbage
collection would remove their schemas."""


def install() -> None:
    """With a torch for CPUs, hide or repair those packages built for CUDA that this process has not imported yet."""
    if not torch_is_cpu_only():
        return
    for name in HIDDEN:
        if name not in sys.modules and needs_cuda(name):
            # None in sys.modules makes find_spec return None and an import raise ModuleNotFoundError: "not installed"
            sys.modules[name] = None  # type: ignore[assignment]
    installed = any(isinstance(finder, _TorchvisionFinder) for finder in sys.meta_path)
    if "torchvision" not in sys.modules and not installed and needs_cuda("torchvision"):
        sys.meta_path.insert(0, _TorchvisionFinder())


def torch_is_cpu_only() -> bool:
    """Return True if the installed torch was built without CUDA. This is read from torch's version file, without
    importing torch."""
    folders = _folders("torch")
    versions = [folder / "version.py" for folder in folders if (folder / "version.py").is_file()]
    return bool(versions) and bool(re.search(r"^cuda\b.*=\s*None\s*$", versions[0].read_text(), re.MULTILINE))


def needs_cuda(package: str) -> bool:
    """Return True if a library in the installed package links CUDA's or torch's CUDA libraries."""
    libraries = [path for folder in _folders(package) for path in folder.rglob("*.so")]
    return any(_links_cuda(path) for path in sorted(libraries, key=lambda path: path.stat().st_size))


class _TorchvisionFinder(importlib.abc.MetaPathFinder):
    """Finds torchvision as usual, and gives it a loader that first defines the missing schemas."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _TorchvisionLoader(spec.loader.name, spec.loader.path)
        return spec


class _TorchvisionLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        if not _defined_schemas:
            _define_schemas()
        super().exec_module(module)


def _define_schemas() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(operator + NMS_SCHEMA)
    _defined_schemas.append(library)


def _folders(package: str) -> list[Path]:
    spec = importlib.machinery.PathFinder.find_spec(package)
    return [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []


def _links_cuda(library: Path) -> bool:
    if not library.stat().st_size:
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return any(content.find(name) >= 0 for name in CUDA_LIBRARIES)
