"""How a training world is divided: tensor, pipeline, context, expert and data parallelism. No torch here.

Leaves out what a layout costs; that is for whoever plans a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the parallel groups; data-parallel replicas of tp x pp x cp ranks each."""

    tp: int = 1
    """Tensor parallel: a layer's matrices are cut over so many ranks."""
    pp: int = 1
    """Pipeline parallel: the layers are dealt to so many stages."""
    cp: int = 1
    """Context parallel: a sequence is cut over so many ranks."""
    ep: int = 1
    """Expert parallel: a layer's experts are dealt to so many ranks."""
    dp: int = 1
    """Data parallel: so many replicas, each with its own samples."""
    sp: bool = False
    """Sequence parallel: with tp > 1, norms and residuals are cut over the tp ranks as well. It saves activation
    memory, which is scarce on GPUs, and costs a quarter of the step's time over gloo; so off unless asked for."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "sp" and (not isinstance(value, int) or value < 1):
                raise ValueError(f"parallel.{field.name} is {value!r}; it counts ranks, so it needs at least 1")

    @property
    def world_size(self) -> int:
        """Ranks of the whole training world."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def sequence_parallel(self) -> bool:
        """True where `sp` has an effect."""
        return self.sp and self.tp > 1


def check_layout(parallel: Parallel, config_json: Mapping[str, Any]) -> None:
    """Raise ValueError where the model of a Hugging Face config.json cannot be divided like this."""
    text = {**config_json, **config_json.get("text_config", {})}
    if parallel.cp != 1:
        raise ValueError(
            f"parallel.cp is {parallel.cp}; this version trains {config_json['model_type']} with cp=1 only, "
            "so set parallel.cp=1 and give the ranks to tp, pp or dp"
        )
    if parallel.ep != 1:
        raise ValueError(
            f"parallel.ep is {parallel.ep}; {config_json['model_type']} has no experts, so set parallel.ep=1"
        )
    _check_divides("tp", parallel.tp, "attention heads", text["num_attention_heads"])
    _check_divides("tp", parallel.tp, "MLP columns", text["intermediate_size"])
    groups = text["num_key_value_heads"]
    if groups % parallel.tp and parallel.tp % groups:
        raise ValueError(
            f"parallel.tp is {parallel.tp} and the model has {groups} key/value heads; one must be a multiple "
            "of the other, so choose another parallel.tp"
        )
    _check_divides("pp", parallel.pp, "layers", text["num_hidden_layers"])
    _check_deepstack(parallel.pp, text["num_hidden_layers"], config_json.get("vision_config", {}))


def _check_deepstack(num_stages: int, num_layers: int, vision: Mapping[str, Any]) -> None:
    """The first stage alone has the tower's features, so the layers that add them must be on it."""
    num_deepstack = len(vision.get("deepstack_visual_indexes") or ())
    if num_layers // num_stages < num_deepstack:
        nearest = max(n for n in range(1, num_stages) if num_layers % n == 0 and num_layers // n >= num_deepstack)
        raise ValueError(
            f"parallel.pp is {num_stages}, which leaves {num_layers // num_stages} layers on the first stage; the "
            f"first {num_deepstack} layers add features of the vision tower, so they must be there: set parallel.pp "
            f"to {nearest} or less"
        )


def _check_divides(axis: str, size: int, what: str, count: int) -> None:
    if count % size:
        options = [n for n in range(1, count + 1) if count % n == 0]
        raise ValueError(
            f"parallel.{axis} is {size} and the model has {count} {what}, which do not divide by it; "
            f"choose one of {', '.join(map(str, options[:8]))}"
        )
