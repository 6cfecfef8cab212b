"""The adapter of one linear layer: matrices A and B, whose product is added to the layer's weight, in any layout.

megatron's layers stay as they are: A and B are parameters of the layer, and a hook adds their product to its output.

- Layers that are cut along their rows (queries, keys and values; gate and up) have the whole A on every
  tensor-parallel rank, and B is cut like the weight.
- Layers that are cut along their columns have A cut like the weight, and the whole B on every rank.
- Layers of the tower are whole on every rank, and so are their adapters.

Where a weight is made of several layers of Hugging Face's model, these share A, and each has its rows of B.

T tokens, r the rank of the product.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from models.compat.megatron_core import (
    TransformerConfig,
    parallel_state,
    set_tensor_model_parallel_attributes,
    tensor_parallel,
)
from models.lora.settings import LoraSettings
from models.lora.targets import Linear
from models.weights.load import LORA_A, LORA_B, WeightTable
from models.weights.slicing import Kind

KINDS: Mapping[Kind, tuple[Kind, Kind]] = {
    "rep": ("rep", "rep"),
    "col": ("rep", "col"),
    "qkv": ("rep", "qkv"),
    "gated": ("rep", "gated"),
    "row": ("row", "rep"),
}
"""How A and B are cut over ranks, by how the weight is cut."""
MASK = "lora_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter of one linear layer of this rank."""

    linear: Linear
    a: torch.nn.Parameter
    """[r, in] or this rank's part of it."""
    b: torch.nn.Parameter
    """[out, r] or this rank's part of it."""
    is_masked: bool
    """True if the layer has a buffer [out, 1] that is 1 on the rows of B that are trained, and 0 on those of layers
    that are no targets."""
    scale: float
    """The factor of the product B A."""
    is_sequence_parallel: bool
    norm_eps: float
    """The epsilon of the norm that Transformer Engine's layers contain."""

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return [T, 1, out] what the layer adds to its output. `inputs` are the layer's, [T, 1, in]."""
        is_cut_by_columns = self.linear.match.kind == "row"
        hidden = torch.nn.functional.linear(self._normal(inputs), self.a)
        if self.linear.match.kind == "rep":
            pass
        elif self.is_sequence_parallel:
            if is_cut_by_columns:
                hidden = tensor_parallel.reduce_scatter_to_sequence_parallel_region(hidden)
            else:
                hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
        elif is_cut_by_columns:
            hidden = tensor_parallel.reduce_from_tensor_model_parallel_region(hidden)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        b = self.b * self.linear.module.get_buffer(MASK) if self.is_masked else self.b
        return torch.nn.functional.linear(hidden, b) * self.scale

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the layer's weight with the product added in float32, in the weight's dtype."""
        return torch.addmm(weight.float(), self.b.float(), self.a.float(), alpha=self.scale).to(weight.dtype)

    def _normal(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs as they meet the weight: Transformer Engine's layers may begin with a norm."""
        norm = dict(self.linear.module.named_parameters(recurse=False)).get("layer_norm_weight")
        if norm is None:
            return inputs
        normal = torch.nn.functional.rms_norm(inputs.float(), (inputs.shape[-1],), eps=self.norm_eps)
        return normal.to(inputs.dtype) * norm


def add_adapter(
    linear: Linear, settings: LoraSettings, *, table: WeightTable, config: TransformerConfig, seed: int
) -> Adapter:
    """Give a layer parameters A and B, and return them: B is 0, and A is drawn as PEFT draws it, the same in every
    layout."""
    weight, kind = linear.module.get_parameter("weight"), linear.match.kind
    num_ranks = 1 if kind == "rep" else parallel_state.get_tensor_model_parallel_world_size()
    rank = 0 if kind == "rep" else parallel_state.get_tensor_model_parallel_rank()
    num_out, num_in = weight.shape
    whole = _drawn(linear.name, settings.rank, num_in * (num_ranks if kind == "row" else 1), seed)
    drawn = whole.chunk(num_ranks, 1)[rank] if kind == "row" else whole
    a = torch.nn.Parameter(drawn.to(weight).contiguous())
    b = torch.nn.Parameter(weight.new_zeros(num_out, settings.rank))
    for param, its_kind, dim in zip((a, b), KINDS[kind], (1, 0)):
        if kind == "rep":
            pass
        elif its_kind == "rep":
            # each rank sees a part of the tokens, so megatron sums its gradient
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        else:
            set_tensor_model_parallel_attributes(param, is_parallel=True, dim=dim, stride=1)
    linear.module.register_parameter(LORA_A, a)
    linear.module.register_parameter(LORA_B, b)
    chosen = linear.chosen(settings.targets)
    if not all(chosen):
        mask = _mask(linear, chosen, table, rank, num_ranks)
        linear.module.register_buffer(MASK, mask.to(weight), persistent=False)
    return Adapter(
        linear=linear,
        a=a,
        b=b,
        is_masked=not all(chosen),
        scale=settings.scale,
        is_sequence_parallel=config.sequence_parallel,
        norm_eps=config.layernorm_epsilon,
    )


def _drawn(name: str, rank: int, num_in: int, seed: int) -> torch.Tensor:
    """Return the whole A [r, in] of a layer: Kaiming's uniform distribution with a = sqrt(5), as in torch's Linear."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    bound = 1 / math.sqrt(num_in)
    return (torch.rand(rank, num_in, generator=torch.Generator().manual_seed(number)) * 2 - 1) * bound


def _mask(linear: Linear, chosen: Sequence[bool], table: WeightTable, rank: int, num_ranks: int) -> torch.Tensor:
    mask = torch.zeros(len(linear.module.get_parameter("weight")), 1)
    shapes = table.full_shapes(linear.match, tuple(mask.shape), num_ranks)
    full = [torch.full(shape, float(is_chosen)) for shape, is_chosen in zip(shapes, chosen, strict=True)]
    for part, values in table.common_parts(linear.match, mask, full, rank, num_ranks):
        part.copy_(values)
    return mask
