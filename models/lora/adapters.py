"""All adapters of a rank: they are added to its layers, turned off for a while, merged into weights, and exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from models.compat.megatron_core import parallel_state
from models.lora.adapter import KINDS, Adapter, add_adapter
from models.lora.settings import LoraSettings
from models.lora.targets import Linear, check_targets, linears
from models.weights.expert_stack import ExpertStack
from models.weights.export import ShardedWeights
from models.weights.load import LORA_A, LORA_B, Held, Match, Rule, WeightTable, global_names
from models.weights.slicing import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A run of elements of a rank's matrix, and its place in the whole matrix."""

    start: int
    """The number of the matrix's elements before it."""
    shape: Shape
    offset: tuple[int, int]
    """The row and the column of its first element in the whole matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A or B of an adapter on this rank, and which elements it has of the whole matrix. The rows of B are in the order
    of Hugging Face's layers."""

    name: str
    """The name in megatron, with the global layer number."""
    param: torch.Tensor
    stretches: tuple[Stretch, ...]
    is_first_copy: bool
    """True on the one of several tensor-parallel ranks with the same values that counts."""


class Adapters:
    """The adapters of this rank's layers. Its other parameters are frozen."""

    def __init__(
        self,
        chunks: Sequence[Any],
        settings: LoraSettings,
        *,
        rules: WeightTable,
        part_of: Callable[[str], str],
        seed: int,
    ) -> None:
        """Freeze a rank's chunks of the model and add adapters to the layers that are targets. All ranks of the world
        must call this together.

        `rules` are those of the model's weights; `part_of` gives the part of the model that a parameter belongs to.
        Raises ValueError, on all ranks, for a target that the model does not have.
        """
        self.settings = settings
        self._is_on = True
        self._chunks = chunks
        self._table = WeightTable([rule for base in rules.rules for rule in _rules_of(base)], rules.shapes)
        self._of_weight: dict[int, Adapter] = {}
        found = [[*linears(chunk, rules, part_of)] for chunk in chunks]
        check_targets(settings.targets, [linear for of_chunk in found for linear in of_chunk], chunks)
        for chunk, of_chunk in zip(chunks, found, strict=True):
            chunk.requires_grad_(False)
            for linear in of_chunk:
                if not any(linear.chosen(settings.targets)):
                    continue
                adapter = add_adapter(linear, settings, table=rules, config=chunk.config, seed=seed)
                self._of_weight[id(linear.module.weight)] = adapter
                linear.module.register_forward_hook(partial(self._add, adapter))
            if chunk.pre_process and "language" in settings.parts and chunk.config.recompute_granularity == "full":
                # megatron's checkpoint of a layer has a gradient only if its input has one
                chunk.language_model.embedding.register_forward_hook(_want_gradient)
        mine = {name for of_chunk in found for linear in of_chunk for name in _chosen_names(linear, settings)}
        everywhere = [mine] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        self.layers = frozenset().union(*everywhere)
        """The adapted layers of the whole model, by their names in the checkpoint."""
        self.weights = ShardedWeights(chunks, self._table, of_adapters=True)
        """A and B as an iterable of (name, full matrix). The names are those of layers in the checkpoint with
        `.lora_A.weight` or `.lora_B.weight`. Parts of a weight that are no targets are among them."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the layers compute with their weights alone in a `with` block."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def merged(self, held: Held) -> Held:
        """Return the value of a parameter, with the adapter of its layer merged into it."""
        adapter = None if isinstance(held, ExpertStack) else self._of_weight.get(id(held))
        if adapter is None:
            return held.detach()
        assert isinstance(held, torch.Tensor)
        return adapter.merged(held.detach())

    def matrices(self) -> Iterator[Matrix]:
        """Yield every matrix of this rank."""
        for chunk in self._chunks:
            for name, param in global_names(chunk, of_adapters=True):
                assert isinstance(param, torch.Tensor)
                match, rank = self._table.match(name), parallel_state.get_tensor_model_parallel_rank()
                yield Matrix(
                    name=name,
                    param=param,
                    stretches=tuple(self._stretches(match, tuple(param.shape))),
                    is_first_copy=match.kind != "rep" or rank == 0,
                )

    def _stretches(self, match: Match, shape: Shape) -> Iterator[Stretch]:
        num_ranks = parallel_state.get_tensor_model_parallel_world_size()
        shard = torch.empty(shape, device="meta")
        shapes = self._table.full_shapes(match, shape, num_ranks)
        columns = shapes[0][1]
        whole = torch.empty(sum(rows for rows, _ in shapes), columns, device="meta")
        full = whole.split([rows for rows, _ in shapes])
        rank = parallel_state.get_tensor_model_parallel_rank()
        for part, place in self._table.common_parts(match, shard, full, rank, num_ranks):
            offset = divmod(int(place.storage_offset()), columns)
            yield Stretch(start=int(part.storage_offset()), shape=tuple(place.shape), offset=offset)

    def _add(self, adapter: Adapter, module: torch.nn.Module, inputs: Sequence[torch.Tensor], output: Any) -> Any:
        """Add a layer's adapter to its output. megatron's layers return their bias beside it."""
        if not self._is_on:
            return output
        if isinstance(output, tuple):
            return (output[0] + adapter.product(inputs[0]), *output[1:])
        return output + adapter.product(inputs[0])


def _chosen_names(linear: Linear, settings: LoraSettings) -> Iterator[str]:
    for name, is_chosen in zip(linear.match.names, linear.chosen(settings.targets), strict=True):
        if is_chosen:
            yield name.removesuffix(".weight")


def _rules_of(base: Rule) -> Iterator[Rule]:
    """Yield the rules of A and B for layers whose weight has the rule `base`; none if such layers have no adapters."""
    is_linear = base.megatron.endswith((".weight", ".{rest}")) and base.kind in KINDS and base.experts is None
    if not is_linear:
        return
    stem, names = base.megatron.removesuffix(".weight"), [name.removesuffix(".weight") for name in base.hugging_face]
    kind_a, kind_b = KINDS[base.kind]
    of_a, of_b = ([f"{name}.{matrix}.weight" for name in names] for matrix in (LORA_A, LORA_B))
    yield Rule(f"{stem}.{LORA_A}", of_a[:1], kind_a, copies=of_a[1:])
    yield Rule(f"{stem}.{LORA_B}", of_b, kind_b)


def _want_gradient(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output
