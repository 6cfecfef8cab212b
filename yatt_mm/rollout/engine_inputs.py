"""vLLM inputs made from requests: token ids, patches of images and videos (`pixel_values`), and the places of the
media in the prompt.

vLLM's own processor does not run. The patches come from the data plane, and the token ids are the ids that the trainer
will use. This module imports vLLM at its top, like `vllm_backend`, so import it only after the environment is prepared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import BatchFeature
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.v1.engine.async_llm import AsyncLLM

from dataplane.client.torch_view import as_tensor
from dataplane.media.kinds import MediaKind
from models.registry import load_recipe
from yatt_mm.rollout.engine_types import EngineConfig, GenerateRequest, MediaTokens, Medium
from yatt_mm.rollout.video_times import engine_seconds

KINDS: tuple[MediaKind, ...] = ("image", "video")
"""The kinds of media that an engine takes."""
FIELDS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""[kind] The names that vLLM gives to the patches and to the grid."""


class InputBuilder:
    """Turns requests into vLLM inputs.

    It knows which media the engine process has cached, and counts the bytes sent.
    """

    num_ipc_bytes: int
    """The number of bytes of media that were handed over for sending to the engine process."""

    def __init__(self, llm: AsyncLLM, config: EngineConfig) -> None:
        multimodal = llm.model_config.multimodal_config
        assert multimodal is not None
        self.num_ipc_bytes = 0
        self._cache = llm.renderer.mm_processor_cache
        self.normalizes_on_device = bool(multimodal.mm_device_do_normalize)
        model_dir = Path(config.model_dir)
        family = load_recipe(model_dir)
        self._affine = None if self.normalizes_on_device else family.pixel_affine(model_dir)
        recipe = family.patch_recipe(model_dir)
        self._merge = int(recipe["merge_size"])
        self._has_tiles = recipe["kernel"] == "tiles"
        self._most = {"image": config.max_images_per_prompt, "video": config.max_videos_per_prompt}
        self._max_model_len = int(llm.model_config.max_model_len)
        hf_config = llm.model_config.hf_config
        self.tokens = MediaTokens.of_config(hf_config.to_dict(), family.IMAGE_MARKS)
        self._tokens_per_second = hf_config.vision_config.to_dict().get("tokens_per_second")

    def build(self, request: GenerateRequest, sample: int) -> EngineInput:
        """Return the input of one sample of a request.

        Call it right before sending: it leaves out media that the engine process already has.

        Raises ValueError if the request is longer than the model allows, or if its media do not fit its prompt.
        """
        begun = request.tokens_begun(sample)
        token_ids = list(request.prompt_token_ids)
        self._check_limits(len(token_ids), request)
        if not request.media:
            return tokens_input([*token_ids, *begun])
        ranges = self._placeholders(token_ids, request.media)
        of_kind = {kind: [at for at, medium in enumerate(request.media) if medium.kind == kind] for kind in KINDS}
        of_kind = {kind: places for kind, places in of_kind.items() if places}
        items = [self._item(medium) for medium in request.media]
        return mm_input(
            prompt_token_ids=[*token_ids, *begun],  # a placeholder token that was sampled is not a medium
            mm_kwargs=MultiModalKwargsItems({kind: [items[at] for at in places] for kind, places in of_kind.items()}),
            mm_hashes={kind: [request.media[at].digest for at in places] for kind, places in of_kind.items()},
            mm_placeholders={kind: [ranges[at] for at in places] for kind, places in of_kind.items()},
        )

    def forget(self, digests: Sequence[str]) -> None:
        """Forget that these media were sent, so that they are sent again at their next use."""
        if self._cache is not None:
            for digest in digests:
                self._cache.invalidate(digest)

    def _check_limits(self, num_tokens: int, request: GenerateRequest) -> None:
        """Check that the request has neither too many tokens nor too many media."""
        if num_tokens + request.max_tokens > self._max_model_len:
            raise ValueError(
                f"a prompt of {num_tokens} tokens and {request.max_tokens} to be sampled exceed max_model_len "
                f"{self._max_model_len}: raise rollout.max_model_len, or lower rollout.max_tokens or the media's size"
            )
        for kind in KINDS:  # vLLM does not check the number of media in ready inputs
            num = sum(medium.kind == kind for medium in request.media)
            if num > self._most[kind]:
                raise ValueError(
                    f"a prompt has {num} {kind}s and rollout.max_{kind}s_per_prompt is {self._most[kind]}: "
                    "raise it, or leave these samples out of the data set"
                )

    def _item(self, medium: Medium) -> MultiModalKwargsItem | None:
        """Return the medium in the form of vLLM; None if the engine process already holds it."""
        if self._cache is not None and self._cache.is_cached_item(medium.digest):
            return self._cache.get_and_update_item(None, medium.digest)[0]
        item = self._new_item(medium)
        self.num_ipc_bytes += medium.patches.nbytes if self.normalizes_on_device else 4 * medium.patches.nbytes
        if self._cache is None:
            return item
        return self._cache.get_and_update_item((item, []), medium.digest)[0]

    def _new_item(self, medium: Medium) -> MultiModalKwargsItem:
        """Return a medium in the form of vLLM, after checking its patches. Raises ValueError if they do not fit."""
        patches, grid = medium.patches, medium.grid_thw
        num, form = (grid[0], "C, S, S") if self._has_tiles else (int(np.prod(grid)), "D")
        if patches.dtype != np.uint8 or patches.ndim != 1 + len(form.split()) or len(patches) != num:
            raise ValueError(
                f"medium {medium.digest} has {patches.dtype} patches {patches.shape} for grid {grid}; wanted uint8 "
                f"[{num}, {form}]: derive it with the model's recipe"
            )
        pixels = self._pixels(patches)
        if self._has_tiles:
            return _tiles_item(pixels, self.tokens.image)
        seconds = None
        if medium.kind == "video" and self._tokens_per_second is not None:
            seconds = engine_seconds(medium.seconds_per_grid, grid[0], self._tokens_per_second)
        return _patches_item(medium.kind, pixels, grid, seconds)

    def _pixels(self, patches: np.ndarray) -> torch.Tensor:
        """Return the patches as a tensor: uint8 if the engine normalises them, else normalised float32.

        Mean and standard deviation are those of the trainer, per channel.
        """
        if self._affine is None:
            return as_tensor(patches)
        mean, std = (torch.tensor(values).view(1, 3, 1) for values in self._affine)
        by_channel = as_tensor(patches).float().div_(255).view(len(patches), 3, -1)
        return by_channel.sub_(mean).div_(std).view(patches.shape)

    def _placeholders(self, token_ids: list[int], media: Sequence[Medium]) -> list[PlaceholderRange]:
        """Return each medium's range of placeholder tokens. Raises ValueError if there are too few or too many."""
        ranges, end, num_wanted = [], 0, 0
        for medium in media:
            num_wanted += int(np.prod(medium.grid_thw)) // self._merge**2
            found, end = self._placeholder(token_ids, medium, end)
            ranges.append(found)
        surplus = sum(token in (self.tokens.image, self.tokens.video) for token in token_ids) - num_wanted
        if surplus:
            raise ValueError(f"the prompt has {surplus} placeholder tokens more than its {len(media)} media fill")
        return ranges

    def _placeholder(self, token_ids: list[int], medium: Medium, start: int) -> tuple[PlaceholderRange, int]:
        """Return the first range that the medium fills at or after `start`, and the index after it.

        If every frame has its own span, the range begins with the opening token of the first span, by which vLLM finds
        the frames, and a mask marks the tokens in it that belong to the video.
        """
        token = self.tokens.of(medium.kind)
        is_apart = medium.kind == "video" and self.tokens.has_spans_per_frame
        num_spans = medium.grid_thw[0] if is_apart else 1
        length = int(np.prod(medium.grid_thw)) // self._merge**2 // num_spans
        begin, end = None, start
        for _ in range(num_spans):
            at = _find(token_ids, token, end)
            end = at + length
            if token_ids[at:end] != [token] * length:
                raise ValueError(
                    f"medium {medium.digest} ({medium.kind}, grid {medium.grid_thw}) needs {length} placeholder "
                    f"tokens in a row from position {at}; the prompt has fewer: expand its pad by the ref's num_tokens"
                )
            begin = at if begin is None else begin
        assert begin is not None
        if not is_apart:
            return PlaceholderRange(offset=begin, length=end - begin), end
        is_video = torch.tensor([found == token for found in token_ids[begin - 1 : end]])
        return PlaceholderRange(offset=begin - 1, length=end - begin + 1, is_embed=is_video), end


def _patches_item(
    kind: MediaKind, pixels: torch.Tensor, grid_thw: tuple[int, int, int], seconds: float | None
) -> MultiModalKwargsItem:
    """Return an image or a video for vLLM's Qwen-VL models: patches [N, D], grid, and the `seconds` between two time
    positions of the grid if given."""
    grid = torch.tensor([grid_thw])
    pixels_name, grid_name = FIELDS[kind]
    fields = {
        pixels_name: MultiModalFieldConfig.flat_from_sizes(kind, grid.prod(-1)),
        grid_name: MultiModalFieldConfig.batched(kind, keep_on_cpu=True),
    }
    tensors = {pixels_name: pixels, grid_name: grid}
    if seconds is not None:
        fields["second_per_grid_ts"] = MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
        tensors["second_per_grid_ts"] = torch.tensor([seconds], dtype=torch.float64)
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(tensors), fields)[kind][0]


def _tiles_item(pixels: torch.Tensor, image_token_id: int) -> MultiModalKwargsItem:
    """Return an image for vLLM's InternVL: tiles [n, C, S, S]."""
    num_tiles = torch.tensor([len(pixels)])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_tiles),
        "image_num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "image_token_id": MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True),
    }
    token = torch.tensor(image_token_id)
    inputs = BatchFeature({"pixel_values": pixels, "image_num_patches": num_tiles, "image_token_id": token})
    return MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"][0]


def _find(token_ids: list[int], token_id: int | None, start: int) -> int:
    """Return the first index of the token at or after `start`; the length of the prompt if there is none."""
    try:
        return token_ids.index(token_id, start) if token_id is not None else len(token_ids)
    except ValueError:
        return len(token_ids)
