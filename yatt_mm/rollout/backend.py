"""vLLM's side of the frontend: its configuration, ready engine inputs, sampling parameters, outputs.

The only module of the frontend that imports vLLM at its top; `Engine.start` imports it inside the prepared
environment (`environment.spawning`). Left out: when to call what, deadlines and caches, which is `engine`'s.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import BatchFeature
from vllm import AsyncEngineArgs, ModelRegistry, SamplingParams
from vllm.inputs import EngineInput, mm_input, tokens_input
from vllm.logprobs import Logprob
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from dataplane.torch_view import as_tensor
from models.registry import load_recipe
from yatt_mm.rollout import environment, plugin
from yatt_mm.rollout.requests import EngineConfig, GenerateRequest, Medium


def is_cpu() -> bool:
    """Whether engines of this process compute on the CPU."""
    return bool(current_platform.is_cpu())


def start_llm(config: EngineConfig) -> AsyncLLM:
    """Start an engine; blocks until it is ready. Must run inside `environment.spawning`.

    The executor is given as a class: vLLM 0.32 replaces the name "uni" on the CPU by a process of its own for the
    worker, which costs another import of torch and vLLM and gains nothing for one thread-bound worker. Prompts are
    never chunked on the CPU: after each chunk vLLM 0.32 rewinds the sample's generator, which torch's CPU generators
    cannot do, and the engine dies.
    """
    max_num_batched_tokens = config.max_num_batched_tokens
    if is_cpu():
        environment.run_eagerly()
        max_num_batched_tokens = max(max_num_batched_tokens, config.max_model_len)  # prompts stay whole, see above
        _register_loaded_model(Path(config.model_dir))
    args = AsyncEngineArgs(
        model=config.model_dir,
        served_model_name=config.name,
        dtype=cast(Any, config.dtype),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=not is_cpu(),
        kv_cache_memory_bytes=config.kv_cache_bytes,
        block_size=cast(Any, config.block_size),
        enforce_eager=is_cpu(),
        enable_sleep_mode=not is_cpu(),
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend=UniProcExecutor if config.tensor_parallel_size == 1 else "mp",
        limit_mm_per_prompt={"image": config.max_images_per_prompt, "video": 0},
        mm_processor_cache_gb=config.media_cache_bytes / 2**30,
        mm_device_do_normalize=config.normalize_on_device,
        skip_mm_profiling=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=cast(Any, {"backend": plugin.BACKEND}),
        disable_log_stats=True,
        enable_log_requests=False,
    )
    return AsyncLLM.from_engine_args(args)


def _register_loaded_model(model_dir: Path) -> None:
    """Spare vLLM the process in which it would import the model's class only to look at it.

    The class is imported here anyway, and on the CPU importing it initialises no device.
    """
    for name in json.loads((model_dir / "config.json").read_text()).get("architectures", ()):
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def sampling_params(request: GenerateRequest, sample: int) -> SamplingParams:
    """Exactly the distribution that the trainer assumes: temperature and nothing else."""
    return SamplingParams(
        max_tokens=request.max_tokens - len(request.tokens_begun(sample)),
        temperature=0.0 if request.greedy else request.temperature,
        top_p=1.0,
        top_k=0,
        seed=None if request.greedy else request.seeds[sample],
        logprobs=len(request.scored_token_ids),  # of these, and always the sampled token's own
        logprob_token_ids=list(request.scored_token_ids) or None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=False,
    )


def logprobs_of(output: CompletionOutput) -> tuple[float, ...]:
    """[T] log-probability of each sampled token."""
    rows = cast(list[dict[int, Logprob]], output.logprobs)
    return tuple(row[token].logprob for token, row in zip(output.token_ids, rows, strict=True))


def scored_logprobs_of(output: CompletionOutput, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Log-probability of each of the tokens as the first of the response; () where no token was sampled."""
    if not token_ids or not output.token_ids:
        return ()
    first = cast(list[dict[int, Logprob]], output.logprobs)[0]
    return tuple(first[token].logprob for token in token_ids)


def versions_of(output: CompletionOutput) -> tuple[int, ...]:
    """[T] version of the weights that gave each token."""
    spans = output.weight_versions or []
    return tuple(int(span.version) for span in spans for _ in range(span.start, span.end))


class InputBuilder:
    """Turns requests into ready engine inputs; knows what the engine process has cached, and counts what is sent."""

    num_ipc_bytes: int
    """Bytes of media handed over to be sent to the engine process."""

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
        self.image_marks: tuple[str, ...] = family.IMAGE_MARKS
        self._has_tiles = recipe["kernel"] == "tiles"
        self._max_images = config.max_images_per_prompt
        self._max_model_len = int(llm.model_config.max_model_len)
        self.image_token_id = int(llm.model_config.hf_config.image_token_id)

    def build(self, request: GenerateRequest, sample: int) -> EngineInput:
        """The input of one sample. Call it right before sending: it decides what the engine already has."""
        begun = request.tokens_begun(sample)
        token_ids = list(request.prompt_token_ids)
        if len(token_ids) + request.max_tokens > self._max_model_len:
            raise ValueError(
                f"a prompt of {len(token_ids)} tokens and {request.max_tokens} to be sampled exceed max_model_len "
                f"{self._max_model_len}: raise rollout.max_model_len, or lower rollout.max_tokens or the images' size"
            )
        if len(request.media) > self._max_images:  # vLLM does not count the media of ready inputs
            raise ValueError(
                f"a prompt has {len(request.media)} images and rollout.max_images_per_prompt is {self._max_images}: "
                "raise it, or leave such samples out"
            )
        if not request.media:
            return tokens_input([*token_ids, *begun])
        ranges = self._placeholders(token_ids, request.media)
        return mm_input(
            prompt_token_ids=[*token_ids, *begun],  # placeholders that were sampled stand for themselves
            mm_kwargs=MultiModalKwargsItems({"image": [self._item(medium) for medium in request.media]}),
            mm_hashes={"image": [medium.digest for medium in request.media]},
            mm_placeholders={"image": ranges},
        )

    def forget(self, digests: Sequence[str]) -> None:
        """Send these media again when they are next used."""
        if self._cache is not None:
            for digest in digests:
                self._cache.invalidate(digest)

    def _item(self, medium: Medium) -> MultiModalKwargsItem | None:
        """None when the engine process holds the medium already."""
        if self._cache is not None and self._cache.is_cached_item(medium.digest):
            return self._cache.get_and_update_item(None, medium.digest)[0]
        item = self._new_item(medium)
        self.num_ipc_bytes += medium.patches.nbytes if self.normalizes_on_device else 4 * medium.patches.nbytes
        if self._cache is None:
            return item
        return self._cache.get_and_update_item((item, []), medium.digest)[0]

    def _new_item(self, medium: Medium) -> MultiModalKwargsItem:
        patches, grid = medium.patches, medium.grid_thw
        num, form = (grid[0], "C, S, S") if self._has_tiles else (int(np.prod(grid)), "D")
        if patches.dtype != np.uint8 or patches.ndim != 1 + len(form.split()) or len(patches) != num:
            raise ValueError(
                f"medium {medium.digest} has {patches.dtype} patches {patches.shape} for grid {grid}; wanted uint8 "
                f"[{num}, {form}]: derive it with the model's recipe"
            )
        pixels = self._pixels(patches)
        return _tiles_item(pixels, self.image_token_id) if self._has_tiles else _patches_item(pixels, grid)

    def _pixels(self, patches: np.ndarray) -> torch.Tensor:
        """uint8 as it is where the engine normalises; else the trainer's affine map, channel by channel."""
        if self._affine is None:
            return as_tensor(patches)
        mean, std = (torch.tensor(values).view(1, 3, 1) for values in self._affine)
        by_channel = as_tensor(patches).float().div_(255).view(len(patches), 3, -1)
        return by_channel.sub_(mean).div_(std).view(patches.shape)

    def _placeholders(self, token_ids: list[int], media: Sequence[Medium]) -> list[PlaceholderRange]:
        ranges, start = [], 0
        for medium in media:
            length = int(np.prod(medium.grid_thw)) // self._merge**2
            offset = _find(token_ids, self.image_token_id, start)
            start = offset + length
            if token_ids[offset:start] != [self.image_token_id] * length:
                raise ValueError(
                    f"medium {medium.digest} (grid {medium.grid_thw}) needs {length} placeholder tokens in a row from "
                    f"position {offset}; the prompt has fewer: expand each image pad by the ref's num_tokens"
                )
            ranges.append(PlaceholderRange(offset=offset, length=length))
        surplus = token_ids[start:].count(self.image_token_id)
        if surplus:
            raise ValueError(f"the prompt has {surplus} placeholder tokens more than its {len(media)} media fill")
        return ranges


def _patches_item(pixels: torch.Tensor, grid_thw: tuple[int, int, int]) -> MultiModalKwargsItem:
    """What vLLM's Qwen-VL models are given of an image: patches [N, D]."""
    grid = torch.tensor([grid_thw])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grid.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs = BatchFeature({"pixel_values": pixels, "image_grid_thw": grid})
    return MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"][0]


def _tiles_item(pixels: torch.Tensor, image_token_id: int) -> MultiModalKwargsItem:
    """What vLLM's InternVL is given of an image: tiles [n, C, S, S]."""
    num_tiles = torch.tensor([len(pixels)])
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", num_tiles),
        "image_num_patches": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        "image_token_id": MultiModalFieldConfig.shared("image", 1, keep_on_cpu=True),
    }
    token = torch.tensor(image_token_id)
    inputs = BatchFeature({"pixel_values": pixels, "image_num_patches": num_tiles, "image_token_id": token})
    return MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"][0]


def _find(token_ids: list[int], token_id: int, start: int) -> int:
    try:
        return token_ids.index(token_id, start)
    except ValueError:
        return len(token_ids)
