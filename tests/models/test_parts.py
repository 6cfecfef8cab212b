"""Tests of single parts of the model, against transformers, torch or a simple implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig, Qwen3VLMoeConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

from models.compat.adam import GroupStepAdam
from models.decoder import logprob
from models.qwen2_5_vl.tower import Tower
from models.sequence.attention import Segments, packed_attention
from models.sequence.distinct_media import deal_media, distinct_media, own_media
from models.sequence.media_tokens import TokenLayout, media_spans
from models.sequence.mrope import Grid, mrope_positions
from models.sequence.packing import pack
from models.weights.load import WeightTable
from models.weights.rules import Prefixes, layer_rules
from models.weights.slicing import Kind, Shapes, common_parts, full_shapes
from tests.models.positions import behind_videos

IMAGE, VIDEO = 6, 7
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sample:
    token_ids: np.ndarray
    loss_mask: np.ndarray
    grid_thw: tuple[Grid, ...] = ()
    patches: tuple[np.ndarray | None, ...] = ()
    media_keys: tuple[str, ...] = ()
    seconds_per_grid: tuple[float, ...] = ()


def make_sample(tokens: list[int], scored: set[int], **images: tuple) -> Sample:
    return Sample(np.array(tokens), np.array([i in scored for i in range(len(tokens))]), **images)


VISION = {"vision_config": {"depth": 1, "hidden_size": 8, "num_heads": 2}, "text_config": {"num_hidden_layers": 0}}
POSITIONS = {
    "qwen2_5_vl": (Qwen2_5_VLModel, Qwen2_5_VLConfig, 4.0),
    "qwen3_vl": (Qwen3VLModel, Qwen3VLConfig, None),
    "qwen3_vl_moe": (Qwen3VLMoeModel, Qwen3VLMoeConfig, None),
}
"""The model and config of transformers and the temporal positions per second, by family."""
SIZES = st.integers(1, 4)
MEDIA = st.tuples(st.booleans(), SIZES, SIZES, SIZES, st.sampled_from([0.3, 1, 2.5]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(MEDIA, st.integers(1, 4)), max_size=4), st.integers(1, 5))
def test_positions_equal_transformers_up_to_what_follows_a_video(media: list[Any], num_text: int) -> None:
    for family, (model_class, config_class, tokens_per_second) in POSITIONS.items():
        tokens, image_grids, video_grids, seconds = [10], [], [], []
        for (is_video, t, h, w, step), gap in media:
            t = t if is_video else 1
            frames = t if is_video and tokens_per_second is None else 1
            for _ in range(frames):
                tokens += [3] + [VIDEO if is_video else IMAGE] * (t // frames * h * w) + [4] * gap
            (video_grids if is_video else image_grids).append((t, 2 * h, 2 * w))
            seconds += [step] if is_video else []
        tokens += [20] * num_text
        wanted = _rope_index(family, model_class, config_class, tokens, image_grids, video_grids, seconds)
        layout = TokenLayout(
            image_token_id=IMAGE, video_token_id=VIDEO, merge_size=2, tokens_per_second=tokens_per_second
        )
        grids = tuple((t if is_video else 1, 2 * h, 2 * w) for (is_video, t, h, w, _), _ in media)
        steps = tuple(step for (_, _, _, _, step), _ in media)
        ids = np.array(tokens)
        spans = media_spans(ids, np.flatnonzero(np.isin(ids, (IMAGE, VIDEO))), grids, steps, layout)
        assert np.array_equal(mrope_positions(len(tokens), spans), wanted), family


def _rope_index(family: str, model_class: Any, config_class: Any, tokens: list[int], *media: list[Any]) -> np.ndarray:
    ids = torch.tensor([tokens])
    images, videos, seconds = (torch.tensor(values) if values else None for values in media)
    with torch.device("meta"):
        model = model_class(config_class(image_token_id=IMAGE, video_token_id=VIDEO, **VISION))
    timed = {} if family.startswith("qwen3") else {"second_per_grid_ts": seconds}
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    positions, _ = model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=images, video_grid_thw=videos, **timed
    )
    found: np.ndarray = behind_videos(positions[:, 0], kinds[0]).numpy()
    return found


@pytest.mark.parametrize("lengths", [[5, 5, 5], [3, 7, 3, 1, 7], [4]])
@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_equals_one_segment_at_a_time(lengths: list[int], causal: bool) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)]).tolist()
    query, key, value = (torch.randn(bounds[-1], heads, 8) for heads in (4, 2, 2))
    found = packed_attention(query, key, value, Segments(bounds, CPU), scale=0.3, causal=causal)
    for begin, end in pairwise(bounds):
        q, k, v = (states[begin:end].transpose(0, 1) for states in (query, key, value))
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.3
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), float("-inf"))
        wanted = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1)
        assert torch.allclose(found[begin:end], wanted, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("entropy_weight", [0.0, 1.0])
def test_logprob_and_entropy_equal_softmax_with_gradients(
    num_tokens: int, entropy_weight: float, one_rank: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprob, "CHUNK_BYTES", 3 * 10 * 4)  # three tokens
    hidden, weight = torch.randn(num_tokens, 5, requires_grad=True), torch.randn(12, 5, requires_grad=True)
    labels = torch.randint(0, 10, (num_tokens,))
    scale = torch.randn(2, num_tokens) * torch.tensor([[1.0], [entropy_weight]])
    head = logprob.Head(group=one_rank, vocab_size=10, temperature=0.7)
    found = torch.stack(logprob.linear_logprob(hidden, weight, labels, head))
    found_grads = torch.autograd.grad((found * scale).sum(), (hidden, weight))
    distribution = (hidden @ weight[:10].t() / 0.7).log_softmax(-1)
    label_logprobs = distribution.gather(1, labels[:, None])[:, 0]
    wanted = torch.stack([label_logprobs, -(distribution.exp() * distribution).sum(-1)])
    wanted_grads = torch.autograd.grad((wanted * scale).sum(), (hidden, weight))
    assert torch.allclose(found, wanted, atol=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found_grads, wanted_grads))


def test_bfloat16_gradients_of_logprobs_follow_float32(one_rank: dist.ProcessGroup) -> None:
    hidden, weight = (torch.randn(rows, 16).bfloat16().requires_grad_() for rows in (6, 24))
    labels = torch.randint(0, 20, (6,))
    head = logprob.Head(group=one_rank, vocab_size=20)
    found = torch.autograd.grad(logprob.linear_logprob(hidden, weight, labels, head)[0].sum(), (hidden, weight))
    wide = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    wanted = torch.autograd.grad(logprob.linear_logprob(*wide, labels, head)[0].sum(), wide)
    for narrow, exact in zip(found, wanted):
        assert narrow.dtype is torch.bfloat16
        assert torch.allclose(narrow.float(), exact, atol=0.02 * float(exact.abs().max()))


def test_a_rank_with_nothing_but_padding_is_refused(one_rank: dist.ProcessGroup) -> None:
    head = logprob.Head(group=one_rank, vocab_size=0)
    with pytest.raises(ValueError, match=r"rank 0 of 1 holds none of the 0 rows .* smaller parallel\.tp"):
        logprob.linear_logprob(torch.ones(1, 2), torch.ones(8, 2), torch.zeros(1, dtype=torch.long), head)


def test_certain_tokens_have_no_entropy_and_finite_gradients(one_rank: dist.ProcessGroup) -> None:
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    head = logprob.Head(group=one_rank, vocab_size=2)
    logprobs, entropy = logprob.linear_logprob(hidden, weight, torch.tensor([0, 0]), head)
    (logprobs.sum() + entropy.sum()).backward()
    assert logprobs.tolist() == entropy.tolist() == [0.0, 0.0]
    assert hidden.grad is not None and hidden.grad.isfinite().all()


FULL_SHAPES: dict[Kind, list[tuple[int, ...]]] = {
    "rep": [(5, 3)],
    "col": [(8, 3)],
    "row": [(3, 8)],
    "vocab": [(13, 3)],
    "qkv": [(16, 3), (8, 3), (8, 3)],
    "gated": [(8, 3), (8, 3)],
}
SHARD_SHAPES: dict[Kind, Callable[[int], tuple[int, ...]]] = {
    "rep": lambda num_ranks: (5, 3),
    "col": lambda num_ranks: (8 // num_ranks, 3),
    "row": lambda num_ranks: (3, 8 // num_ranks),
    "vocab": lambda num_ranks: (16 // num_ranks, 3),
    "qkv": lambda num_ranks: (32 // num_ranks, 3),
    "gated": lambda num_ranks: (16 // num_ranks, 3),
}


@pytest.mark.parametrize("kind", FULL_SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_is_cut_and_joined_again_has_the_same_bits(kind: Kind, num_ranks: int) -> None:
    shapes = Shapes(num_heads=4, num_groups=2, vocab_size=13, padded_vocab_size=16)
    full = [torch.randn(shape) for shape in FULL_SHAPES[kind]]
    joined = [torch.full(shape, torch.nan) for shape in FULL_SHAPES[kind]]
    shard_shape = SHARD_SHAPES[kind](num_ranks)
    assert full_shapes(kind, shard_shape, shapes, num_ranks) == FULL_SHAPES[kind]
    for rank in range(num_ranks):
        shard = torch.full(shard_shape, torch.nan)
        for part, full_part in common_parts(kind, shard, full, shapes, rank, num_ranks):
            part.copy_(full_part)
        for part, full_part in common_parts(kind, shard, joined, shapes, rank, num_ranks):
            full_part.copy_(part)
        assert kind == "vocab" or shard.isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(joined, full, strict=True))


def test_megatron_wants_query_key_and_value_of_each_group_together() -> None:
    shapes = Shapes(num_heads=4, num_groups=2, vocab_size=13, padded_vocab_size=16)
    query, key, value = (torch.tensor(values) for values in ([0, 1, 2, 3], [10, 11], [20, 21]))
    shards = torch.full((2, 4), -1)
    for rank, shard in enumerate(shards):
        for part, full_part in common_parts("qkv", shard, [query, key, value], shapes, rank, 2):
            part.copy_(full_part)
    assert shards.tolist() == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_normalised_patches_equal_the_processors_pixel_values(one_rank: dist.ProcessGroup) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (56, 84, 3), dtype=np.uint8))
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 64)
    wanted = processor(image, return_tensors="pt")["pixel_values"]
    raw = processor(image, do_rescale=False, do_normalize=False, return_tensors="pt")["pixel_values"]
    config = Qwen2_5_VLConfig(vision_config={"depth": 1, "hidden_size": 8, "num_heads": 2}).vision_config
    visual = Qwen2_5_VisionTransformerPretrainedModel(config)
    tower = Tower(visual, mean=processor.image_mean, std=processor.image_std, group=one_rank)
    assert (tower.normalise(raw.to(torch.uint8)) - wanted).abs().max() < 1e-6


@given(st.lists(st.integers(1, 100), max_size=12), st.integers(1, 4))
def test_every_image_is_dealt_once_and_evenly(costs: list[int], num_ranks: int) -> None:
    shares = deal_media([(1, 1, cost) for cost in costs], num_ranks)
    assert sorted(image for share in shares for image in share) == list(range(len(costs)))
    loads = [sum(costs[image] for image in share) for share in shares]
    assert max(loads) - min(loads) <= max(costs, default=0)


def test_ranks_agree_on_who_encodes_what_without_any_patches() -> None:
    grids = ((1, 2, 4), (1, 2, 2))
    first = make_sample([10], set(), grid_thw=grids, media_keys=("large", "small"))
    second = make_sample([10], set(), grid_thw=grids[:1], media_keys=("large",))
    assert distinct_media([first, second]).numbers == ((0, 1), (0,))
    assert own_media([first, second], rank=0, num_ranks=2) == [(True, False), (True,)]
    assert own_media([first, second], rank=1, num_ranks=2) == [(False, True), (False,)]
    # more ranks than media: the last one has none
    assert own_media([first, second], rank=2, num_ranks=3) == [(False, False), (False,)]


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_adam_equals_torchs(is_decoupled: bool) -> None:
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 10)) for _ in range(2))
    options = {"lr": 1e-2, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.1}
    torchs = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    optimizers = [GroupStepAdam([ours], adam_w_mode=is_decoupled, **options), torchs([theirs], **options)]
    for step in range(4):
        ours.grad = theirs.grad = torch.sin(torch.arange(10.0) + step)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=1e-7)


LAYOUT = TokenLayout(image_token_id=IMAGE, video_token_id=VIDEO, merge_size=2)


def test_packing_by_hand() -> None:
    image = np.zeros((8, 6), np.uint8)
    first = make_sample([10, IMAGE, IMAGE, 11, 12], {3, 4}, grid_thw=((1, 2, 4),), patches=(image,))
    second = make_sample([13, IMAGE, IMAGE, 14], {3}, grid_thw=((1, 2, 4),), patches=(image,))
    batch = pack([first, second], LAYOUT, multiple_of=4, device=CPU)
    assert batch.token_ids.tolist() == [10, IMAGE, IMAGE, 11, 12, 13, IMAGE, IMAGE, 14, 0, 0, 0]
    assert batch.segments.bounds == (0, 5, 9, 12)
    assert batch.predict_rows.tolist() == [2, 3, 7]
    assert batch.labels.tolist() == [11, 12, 14]
    assert batch.num_scored == (2, 1)
    assert batch.position_ids[:, 0].tolist() == [
        [0, 1, 1, 3, 4, 0, 1, 1, 3, 0, 1, 2],
        [0, 1, 1, 3, 4, 0, 1, 1, 3, 0, 1, 2],
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2],
    ]
    # the same array is encoded once
    assert batch.grids == ((1, 2, 4),)
    assert batch.visual_slots.tolist() == [1, 2, 6, 7]
    assert batch.visual_rows.tolist() == [0, 1, 0, 1]


def test_a_sampled_image_token_is_text() -> None:
    batch = pack([make_sample([10, IMAGE, VIDEO], {1, 2})], LAYOUT, multiple_of=1, device=CPU)
    assert batch.labels.tolist() == [IMAGE, VIDEO]
    assert batch.visual_slots.tolist() == [] and batch.position_ids[0, 0].tolist() == [0, 1, 2]


def test_no_samples_pack_to_padding_alone() -> None:
    batch = pack([], LAYOUT, multiple_of=2, device=CPU)
    assert batch.token_ids.tolist() == [0, 0]
    assert batch.labels.tolist() == [] and batch.num_scored == ()


PATCHES = np.zeros((4, 6), np.uint8)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (make_sample([10, IMAGE, 11], {2}), "sample 0 has 1 image and video tokens, and media .* make 0"),
        (make_sample([10, VIDEO, 11], {2}), "sample 0 has 1 image and video tokens, and media .* make 0"),
        (
            make_sample([10, IMAGE, 11, IMAGE, 12], {4}, grid_thw=((1, 2, 4),)),
            "sample 0 has medium 0 .* needs 2 equal tokens in a row from token 1",
        ),
        (make_sample([10, VIDEO, IMAGE, 12], {3}, grid_thw=((2, 2, 2),)), "medium 0 .* needs 1 equal tokens in a row"),
        (make_sample([10, 11], {0}), "scores its first token"),
        (
            make_sample([10, IMAGE, 11], {2}, grid_thw=((1, 2, 2),), patches=(PATCHES, None)),
            "2 media's patches and 1 grids",
        ),
        (make_sample([10, IMAGE, 11], {2}, grid_thw=((1, 2, 2),), media_keys=("a", "b")), "2 media keys and 1 grids"),
        (make_sample([10, IMAGE, 11], {2}, grid_thw=((1, 2, 2),), patches=(PATCHES[:3],)), "3 patches do not fill"),
    ],
)
def test_samples_that_contradict_themselves_are_refused(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([sample], LAYOUT, multiple_of=1, device=CPU)


def test_norms_inside_transformer_engines_layers_have_the_same_source() -> None:
    shapes = Shapes(num_heads=4, num_groups=2, vocab_size=13, padded_vocab_size=16)
    prefixes = Prefixes(text="model.", visual="visual.")
    table = WeightTable(layer_rules(prefixes), shapes)
    for fused, apart in (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    ):
        layer = "language_model.decoder.layers.3."
        assert table.match(layer + fused).names == table.match(layer + apart).names
