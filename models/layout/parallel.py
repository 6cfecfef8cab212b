"""The parallel layout: how a training world is divided into tensor, pipeline, context, expert and data parallelism. No
torch here.

The cost of a layout is not considered here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from models.layout.divisors import check_divides, divisors, nearest
from models.layout.stages import check_deepstack, stage_layers

Order = Literal["contiguous", "zigzag"]
Comm = Literal["a2a", "allgather"]
"""How context-parallel ranks exchange data. a2a: ranks exchange heads for tokens (Ulysses, arXiv 2309.14509).
allgather: every rank gets all keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The sizes of the parallel groups. Data-parallel replicas have tp x pp x cp ranks each."""

    tp: int = 1
    """Tensor parallel: a layer's matrices are cut over this number of ranks."""
    pp: int = 1
    """Pipeline parallel: the layers are divided over this number of stages."""
    vpp: int = 1
    """Virtual pipeline: each stage holds this number of chunks of neighbouring layers, which shortens the idle time."""
    first_stage_layers: int | None = None
    """The number of layers of the first stage, which has the vision tower as well; None divides all layers evenly."""
    last_stage_layers: int | None = None
    """The number of layers of the last stage, which has the head as well; None divides all layers evenly."""
    cp: int = 1
    """Context parallel: a sequence is cut over this number of ranks."""
    cp_comm: Comm = "a2a"
    """How context-parallel ranks attend to each other's tokens: they exchange heads (a2a) or gather keys and values."""
    cp_order: Order = "contiguous"
    """Which tokens of a packed stream a rank holds: a slice, or pieces of every sequence (zigzag)."""
    ep: int = 1
    """Expert parallel: a layer's experts are divided over this number of ranks of a stage, across replicas."""
    etp: int = 1
    """Expert tensor parallel: each expert's matrices are cut over this number of ranks."""
    dp: int = 1
    """Data parallel: the number of replicas, each with its own samples."""
    sp: bool = False
    """Sequence parallel: with tp > 1, norms and residuals are cut over the tp ranks as well. It saves activation
    memory, which is scarce on GPUs, and costs a quarter of the step's time over gloo, so it is off by default."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if "int" in str(field.type) and value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"parallel.{field.name} is {value!r}; it is a count, so it needs at least 1")

    @property
    def world_size(self) -> int:
        """The number of ranks of the whole training world."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """True if `sp` has an effect."""
        return self.sp and self.tp > 1


def check_layout(parallel: Parallel, config_json: Mapping[str, Any]) -> None:
    """Raise ValueError if the model of a Hugging Face config.json cannot be divided in this layout."""
    text = {**config_json, **config_json.get("text_config", {})}
    _check_experts(parallel, config_json["model_type"], text)
    _check_decoder("parallel.tp", parallel.tp, text)
    _check_heads(parallel, text["num_attention_heads"])
    stages = stage_layers(
        text["num_hidden_layers"],
        pp=parallel.pp,
        vpp=parallel.vpp,
        first=parallel.first_stage_layers,
        last=parallel.last_stage_layers,
    )
    vision = config_json.get("vision_config") or {}
    check_deepstack(stages[0], parallel.vpp, len(vision.get("deepstack_visual_indexes") or ()))


def check_engine_layout(key: str, tp: int, config_json: Mapping[str, Any]) -> None:
    """Raise ValueError, with the name `key` for `tp`, if vLLM cannot cut the model over this number of devices."""
    text = {**config_json, **config_json.get("text_config", {})}
    _check_decoder(key, tp, text)
    if "moe_intermediate_size" in text:
        check_divides(key, tp, "MLP columns of an expert", text["moe_intermediate_size"])
    vision = config_json.get("vision_config") or {}
    if "num_heads" in vision:
        check_divides(key, tp, "heads in its vision tower", vision["num_heads"])
        check_divides(key, tp, "MLP columns in its vision tower", vision["intermediate_size"])


def _check_decoder(key: str, tp: int, text: Mapping[str, Any]) -> None:
    check_divides(key, tp, "attention heads", text["num_attention_heads"])
    check_divides(key, tp, "MLP columns", text["intermediate_size"])
    groups = text["num_key_value_heads"]
    if groups % tp and tp % groups:
        raise ValueError(
            f"{key} is {tp} and the model has {groups} key/value heads; one must be a multiple of the other, so choose "
            f"another {key}"
        )


def _check_experts(parallel: Parallel, model_type: str, text: Mapping[str, Any]) -> None:
    num_experts = text.get("num_experts") or text.get("num_local_experts")
    if num_experts is None:
        for axis, size in (("ep", parallel.ep), ("etp", parallel.etp)):
            if size != 1:
                raise ValueError(f"parallel.{axis} is {size}; {model_type} has no experts, so set parallel.{axis}=1")
        return
    check_divides("parallel.ep", parallel.ep, "experts", num_experts)
    check_divides("parallel.etp", parallel.etp, "MLP columns of an expert", text["moe_intermediate_size"])
    of_experts, of_stage = parallel.ep * parallel.etp, parallel.tp * parallel.cp * parallel.dp
    if of_stage % of_experts:
        raise ValueError(
            f"parallel.ep x etp is {of_experts}, and a pipeline stage has tp x cp x dp = {of_stage} ranks, which do "
            f"not divide by it; set parallel.dp to {of_experts // math.gcd(of_experts, parallel.tp * parallel.cp)} "
            "or a multiple, or lower parallel.ep"
        )
    if of_experts % parallel.tp and parallel.tp % of_experts:
        raise ValueError(
            f"parallel.ep x etp is {of_experts} and parallel.tp is {parallel.tp}; one must be a multiple of the "
            "other, so change parallel.ep"
        )
    if parallel.tp > 1 and not parallel.sp:
        raise ValueError(
            f"parallel.tp is {parallel.tp} and {model_type} has experts, for which every tensor-parallel rank needs "
            "tokens of its own: set parallel.sp=true"
        )


def _check_heads(parallel: Parallel, num_heads: int) -> None:
    """Check that each rank gets whole heads when ranks exchange heads for tokens."""
    per_rank = num_heads // parallel.tp
    if parallel.cp_comm == "a2a" and per_rank % parallel.cp:
        raise ValueError(
            f"parallel.cp is {parallel.cp} and each tensor-parallel rank has {per_rank} attention heads, which "
            "cp_comm=a2a deals to the context-parallel ranks; choose parallel.cp "
            f"{nearest(divisors(per_rank), parallel.cp)}, or parallel.cp_comm=allgather"
        )
