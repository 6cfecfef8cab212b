"""Counts the operations of training on a sample, from the model's config.json alone. Balancing and utilisation use the
counts.

It counts the matrix products that this project's code runs, a multiplication and an addition as two operations, like
torch's FlopCounterMode: attention over all pairs of a sequence (a causal kernel skips half of them, but runs at a lower
rate than matrix products), the head on scored tokens only and twice forward, the vision tower once per image. Norms,
activations, softmax, the optimizer and communication are left out. `TOWERS` has one function per vision tower; a new
family adds its own. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both import torch
    from models.freeze import Part
    from models.layout.parallel_settings import Recompute

Grid = tuple[int, int, int]
"""(t, h, w) of an image or video, in patches."""

HEAD_PASSES = 4
"""The number of passes of the head: forward, the same again in the backward pass, and the gradients of hidden states
and weight."""
ATTENTION_BACKWARD = 2.5
"""The backward pass of attention, relative to the forward pass. Fused kernels compute the scores again: five products
where the forward pass has two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """The numbers of operations, forward and backward, of each part of the model: per token, per patch, and per pair of
    them."""

    per_token: int
    """The operations of the decoder's linear layers, per token; with experts, those that a token visits."""
    per_token_pair: int
    """The operations of the decoder's attention, for each pair of tokens of a sequence."""
    per_scored: int
    """The operations of the head, for each token with a log-probability."""
    per_patch: int
    """The operations of the linear layers of the vision tower and of its mergers, per patch."""
    per_patch_pair: int
    """The operations of attention in the tower's blocks that see a whole frame, for each pair of its patches."""
    per_window_pair: int
    """The operations of attention in the tower's blocks that see windows, for each pair of patches of a window."""
    window: int
    """The number of patches along each side of a window; 0 if the tower has no windows."""
    num_class_tokens: int = 0
    """The number of class tokens of the tower, in addition to the patches of each frame. Its blocks process them as
    well."""
    per_class_token: int = 0
    """The operations of the linear layers of the tower's blocks, per class token."""

    def decoder(self, num_tokens: int, num_scored: int) -> int:
        """Return the decoder's operations for one sequence, with its image tokens expanded."""
        return self.per_token * num_tokens + self.per_token_pair * num_tokens**2 + self.per_scored * num_scored

    def tower(self, grids: Sequence[Grid]) -> int:
        """Return the tower's operations for images and videos that are encoded once each."""
        return sum(self._encode(*grid) for grid in grids)

    def _encode(self, num_frames: int, height: int, width: int) -> int:
        num_tokens = height * width + self.num_class_tokens
        frame = self.per_patch * height * width + self.per_class_token * self.num_class_tokens
        frame += self.per_patch_pair * num_tokens**2
        if self.window:
            pairs = _sum_of_squares(height, self.window) * _sum_of_squares(width, self.window)
            frame += self.per_window_pair * pairs
        return num_frames * frame


def count_operations(
    config_json: Mapping[str, Any],
    *,
    freeze: Collection[Part] = (),
    adapted: Collection[str] | None = None,
    recompute: Recompute = "none",
) -> Operations:
    """Return the operations of the model of a Hugging Face config.json.

    Frozen parts have no gradients of weights, and no gradients at all where nothing before them is trained. `adapted`:
    with LoRA the parts in which layers have adapters. Then no weight has a gradient, and the adapters' own operations,
    one in a hundred or so, do not count. With
    `recompute` full, the layers of decoder and trained tower run forward twice; selective, the decoder's attention.

    Raises:
        ValueError: a family whose tower is not described here.
    """
    family = config_json["model_type"]
    if family not in TOWERS:
        raise ValueError(
            f"no operations are known of model_type {family!r}, only of {', '.join(sorted(TOWERS))}; describe its "
            "vision tower in models/flops.py"
        )
    text = {**config_json, **config_json.get("text_config", {})}
    tower = TOWERS[family](config_json)
    learning = {"tower", "merger", "language"} - set(freeze) if adapted is None else set(adapted)
    trained = learning if adapted is None else set[str]()
    embeds_learn = bool({"tower", "merger"} & learning)
    backward = _backward(trained="language" in trained, learns_below=embeds_learn or "language" in learning)
    linear_passes = 1 + backward + (recompute == "full")
    attention_passes = 1 + ATTENTION_BACKWARD + (recompute != "none")
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    attention_width = text["num_attention_heads"] * _head_size(text)
    return Operations(
        per_token=2 * linear_passes * _decoder_weights(text),
        per_token_pair=round(4 * attention_passes * layers * attention_width),
        per_scored=2 * HEAD_PASSES * hidden * text["vocab_size"],
        **_tower_operations(tower, trained, learning, runs_twice=recompute == "full" and "tower" in learning),
        window=tower.window,
        num_class_tokens=tower.num_class_tokens,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The shape of a vision tower."""

    embedding_weights: int
    """The number of weights of the layer that embeds a patch."""
    block_weights: int
    """The number of weights of the linear layers of all blocks."""
    merger_weights: int
    """The number of weights of the linear layers of all mergers."""
    last_weights: int = 0
    """The number of weights of linear layers of the blocks whose results no gradient needs. They are not computed
    again."""
    patches_per_token: int
    hidden_size: int
    num_full_blocks: int
    """The number of blocks whose attention sees a whole frame."""
    num_window_blocks: int
    window: int
    """The number of patches along each side of a window; 0 without windows."""
    num_class_tokens: int = 0
    """The number of class tokens, in addition to the patches of each frame."""


def _tower_operations(
    tower: Tower, trained: Collection[str], learning: Collection[str], *, runs_twice: bool
) -> dict[str, int]:
    """Return the tower's operations. Parts that are `trained` have gradients of weights; those that are `learning`
    have gradients that go through them."""
    trains_tower, learns_tower = "tower" in trained, "tower" in learning
    blocks = (1 + _backward(trained=trains_tower, learns_below=learns_tower)) * tower.block_weights
    blocks += runs_twice * (tower.block_weights - tower.last_weights)
    # a merger begins with a norm, which is trained as well
    merger_passes = 1 + _backward(trained="merger" in trained, learns_below=learns_tower or "merger" in learning)
    pair = round(4 * tower.hidden_size * (1 + ATTENTION_BACKWARD * learns_tower + runs_twice))
    return {
        # the gradient of pixels is not needed
        "per_patch": 2 * (1 + trains_tower) * tower.embedding_weights
        + 2 * blocks
        + 2 * merger_passes * tower.merger_weights // tower.patches_per_token,
        "per_patch_pair": pair * tower.num_full_blocks,
        "per_window_pair": pair * tower.num_window_blocks,
        "per_class_token": 2 * blocks if tower.num_class_tokens else 0,
    }


def _backward(*, trained: bool, learns_below: bool) -> int:
    """Return the backward products of a linear layer: one for its weight, and one for its input where a layer below is
    trained."""
    return int(trained) + int(learns_below)


def _decoder_weights(text: Mapping[str, Any]) -> int:
    """Return the number of weights that a token meets in all layers of the decoder."""
    hidden, head_size = text["hidden_size"], _head_size(text)
    query, key = text["num_attention_heads"] * head_size, text["num_key_value_heads"] * head_size
    attention = 2 * hidden * query + 2 * hidden * key
    layers = range(text["num_hidden_layers"])
    is_sparse = [_has_experts(text, layer) for layer in layers]
    dense = 3 * hidden * text["intermediate_size"]
    sparse = 0
    if any(is_sparse):
        router = hidden * _num_experts(text)
        sparse = router + 3 * hidden * text["moe_intermediate_size"] * text["num_experts_per_tok"]
    return sum(attention + (sparse if has_experts else dense) for has_experts in is_sparse)


def _has_experts(text: Mapping[str, Any], layer: int) -> bool:
    if not _num_experts(text) or layer in text.get("mlp_only_layers", ()):
        return False
    return (layer + 1) % int(text.get("decoder_sparse_step", 1)) == 0


def _num_experts(text: Mapping[str, Any]) -> int:
    """Return the number of experts; 0 for a dense model. transformers and the released checkpoints use different keys
    for it."""
    return int(text.get("num_experts") or text.get("num_local_experts") or 0)


def _head_size(text: Mapping[str, Any]) -> int:
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _sum_of_squares(length: int, window: int) -> int:
    """Return the sum of the squares of the pieces' lengths, when `length` is cut into pieces of `window`."""
    return length // window * window**2 + (length % window) ** 2


def _qwen2_5_vl(config: Mapping[str, Any]) -> Tower:
    vision = config["vision_config"]
    num_full = len(vision["fullatt_block_indexes"])
    return Tower(
        **_qwen_tower(vision, mlp_matrices=3, num_mergers=1),
        num_full_blocks=num_full,
        num_window_blocks=vision["depth"] - num_full,
        window=_whole_windows(vision),
    )


def _qwen3_vl(config: Mapping[str, Any]) -> Tower:
    vision = config["vision_config"]
    num_mergers = 1 + len(vision["deepstack_visual_indexes"])
    return Tower(
        **_qwen_tower(vision, mlp_matrices=2, num_mergers=num_mergers),
        num_full_blocks=vision["depth"],
        num_window_blocks=0,
        window=0,
    )


def _whole_windows(vision: Mapping[str, Any]) -> int:
    """Return the side of a window in patches, rounded to whole visual tokens."""
    merge = int(vision["spatial_merge_size"])
    return int(vision["window_size"]) // merge // int(vision["patch_size"]) * merge


def _qwen_tower(vision: Mapping[str, Any], *, mlp_matrices: int, num_mergers: int) -> dict[str, Any]:
    hidden, merged = vision["hidden_size"], vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    channels = vision.get("in_channels") or vision.get("in_chans", 3)
    values = channels * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    matrix = hidden * vision["intermediate_size"]
    block = 4 * hidden**2 + mlp_matrices * matrix
    return {
        "embedding_weights": values * hidden,
        "block_weights": vision["depth"] * block,
        "last_weights": vision["depth"] * matrix,
        "merger_weights": num_mergers * merged * (merged + vision["out_hidden_size"]),
        "patches_per_token": vision["spatial_merge_size"] ** 2,
        "hidden_size": hidden,
    }


def _internvl(config: Mapping[str, Any]) -> Tower:
    vision, text_hidden = config["vision_config"], config["text_config"]["hidden_size"]
    hidden, layers = vision["hidden_size"], vision["num_hidden_layers"]
    patch = vision["patch_size"]
    height, width = patch if isinstance(patch, list) else (patch, patch)
    square = round(1 / config.get("downsample_ratio", 0.5)) ** 2
    return Tower(
        embedding_weights=vision.get("num_channels", 3) * height * width * hidden,
        block_weights=layers * (4 * hidden**2 + 2 * hidden * vision["intermediate_size"]),
        merger_weights=text_hidden * (square * hidden + text_hidden),
        patches_per_token=square,
        hidden_size=hidden,
        num_full_blocks=layers,
        num_window_blocks=0,
        window=0,
        num_class_tokens=1,
    )


TOWERS: Mapping[str, Callable[[Mapping[str, Any]], Tower]] = {
    "internvl": _internvl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
}
"""From model_type to the function that reads its vision tower from the config.json."""
