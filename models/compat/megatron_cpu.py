"""Runs megatron-core on CPU and gloo without changing torch: an import hook rewrites megatron's source.

Each module of `megatron.core` is compiled from a syntax tree in which

    torch.cuda.X          becomes  X of models.compat.cuda_stand_in
    "cuda", "cuda:0"      become   "cpu"
    "torch.cuda.*Tensor"  becomes  "torch.*Tensor" (the optimizer compares tensor.type() with it)
    tensor.cuda(...)      becomes  tensor.cpu()
    pin_memory            is off

A few functions are replaced after the import, because rewriting cannot repair them. Line numbers do not change, a call
costs nothing more, and other packages in the process see the real torch. Compiled code is cached beside Python's own
caches, under a tag of its own. The hook is never installed on a machine with a CUDA device.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import torch

from models.compat.cuda_stand_in import CUDA

PACKAGE = "megatron.core"
STAND_IN = "_cuda_stand_in"
CACHE_TAG = f"yatt{zlib.crc32(Path(__file__).read_bytes()):08x}"
"""A tag that changes when this file changes, so that code compiled by another version of the rewriting is never
used."""


def install() -> None:
    """Install the import hook. Raises RuntimeError if there is a CUDA device, or if megatron.core is already
    imported."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if torch.cuda.is_available():
        raise RuntimeError("found a CUDA device; this hook is for machines without one, so do not install it")
    if PACKAGE in sys.modules:
        raise RuntimeError(
            f"{PACKAGE} was imported before the hook that makes it run without CUDA; "
            "import it through models.compat.megatron_core, or call models.compat.megatron.prepare() first"
        )
    sys.meta_path.insert(0, _Finder())


class _Rewrite(ast.NodeTransformer):
    """The table in this file's docstring, as a transformation of syntax trees."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        text = node.value
        if not isinstance(text, str):
            return node
        if text == "cuda" or (text.startswith("cuda:") and text[5:].isdigit()):
            return ast.copy_location(ast.Constant("cpu"), node)
        if text.startswith("torch.cuda.") and text.endswith("Tensor"):
            return ast.copy_location(ast.Constant(text.replace(".cuda", "", 1)), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr == "cuda" and _is_torch(node.value) and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Name(STAND_IN, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        method = node.func
        if isinstance(method, ast.Attribute) and method.attr == "cuda" and not _is_torch(method.value):
            to_cpu = ast.copy_location(ast.Attribute(method.value, "cpu", ast.Load()), method)
            node = ast.copy_location(ast.Call(to_cpu, [], []), node)
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "pin_memory":
            return node.func.value
        return node


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds megatron.core's modules as usual, and gives them the rewriting loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles modules from the rewritten tree. It has its own cache of compiled code."""

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path)
        stat = source.stat()
        stamp = struct.pack("<QQ", stat.st_mtime_ns, stat.st_size)
        cached = Path(importlib.util.cache_from_source(self.path, optimization=CACHE_TAG))
        if cached.is_file():
            content = cached.read_bytes()
            if content.startswith(stamp):
                return cast(CodeType, marshal.loads(content[len(stamp) :]))
        tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(source.read_bytes(), self.path)))
        code = compile(tree, self.path, "exec", dont_inherit=True)
        _write_cache(cached, stamp + marshal.dumps(code))
        return code

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[STAND_IN] = CUDA
        super().exec_module(module)
        if module.__name__ in AFTER_IMPORT:
            AFTER_IMPORT[module.__name__](vars(module))


def _write_cache(path: Path, content: bytes) -> None:
    """Write the compiled code if possible. If the installation is read-only, each process compiles again, as with
    Python's own cache."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def _fix_random(module: dict[str, Any]) -> None:
    """Replace the two functions that use CUDA's random generators."""

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def get_state(device: str = "cpu", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    module["_set_cuda_rng_state"] = set_state
    module["_get_cuda_rng_state"] = get_state


def _fix_jit(module: dict[str, Any]) -> None:
    """Turn torch.compile off: it would compile for seconds without a benefit on the CPU."""
    module["disable_jit_fuser"]()


def _fix_finalize(module: dict[str, Any]) -> None:
    """Replace ReduceOp.AVG, which gloo lacks, in the averaging of gradients over tensor-parallel ranks."""
    _replace_collectives(module, all_reduce=_all_reduce_with_average)


def _fix_mappings(module: dict[str, Any]) -> None:
    """Replace gathers and scatters, because gloo needs equal parts and experts get different numbers of tokens."""
    _replace_collectives(module, all_gather=_all_gather_uneven, reduce_scatter=_reduce_scatter_uneven)


def _replace_collectives(module: dict[str, Any], **collectives: Callable[..., Any]) -> None:
    """Give one module its own `torch.distributed`, in which these collectives are replaced."""
    patched = ModuleType("torch")
    vars(patched).update(vars(module["torch"]))
    distributed = ModuleType("torch.distributed")
    vars(distributed).update(vars(torch.distributed))
    vars(distributed).update(collectives)
    vars(patched)["distributed"] = distributed
    module["torch"] = patched


def _all_reduce_with_average(
    tensor: torch.Tensor,
    op: Any = torch.distributed.ReduceOp.SUM,
    group: torch.distributed.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    if op != torch.distributed.ReduceOp.AVG:
        return torch.distributed.all_reduce(tensor, op=op, group=group, async_op=async_op)
    torch.distributed.all_reduce(tensor, group=group)
    tensor.div_(torch.distributed.get_world_size(group))
    return None


def _all_gather_uneven(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: torch.distributed.ProcessGroup
) -> None:
    for rank, part in enumerate(tensor_list):
        if part.numel():
            if rank == group.rank():
                part.copy_(tensor)
            torch.distributed.broadcast(part, group_src=rank, group=group)


def _reduce_scatter_uneven(
    output: torch.Tensor, input_list: list[torch.Tensor], group: torch.distributed.ProcessGroup
) -> None:
    for rank, part in enumerate(input_list):
        if part.numel():
            summed = part.contiguous().clone()
            torch.distributed.reduce(summed, group_dst=rank, group=group)
            if rank == group.rank():
                output.copy_(summed)


def _fix_experts(module: dict[str, Any]) -> None:
    """Keep splits from being converted to numbers, which is only right for CUDA tensors."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module["maybe_move_tensor_to_cpu"] = to_host


AFTER_IMPORT: dict[str, Callable[[dict[str, Any]], None]] = {
    "megatron.core.jit": _fix_jit,
    "megatron.core.tensor_parallel.random": _fix_random,
    "megatron.core.tensor_parallel.mappings": _fix_mappings,
    "megatron.core.distributed.finalize_model_grads": _fix_finalize,
    "megatron.core.transformer.moe.moe_utils": _fix_experts,
}
