"""Calls and types of vLLM's frontend: engine arguments, sampling parameters, outputs.

Only this module, `engine_inputs` and the modules that vLLM itself loads import vLLM at their top.
`EngineProcess.launch` imports it inside the prepared environment (`vllm_environment.spawning`). Left out: the order of
calls, deadlines and caches, which are in `vllm_engine`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from vllm import AsyncEngineArgs, ModelRegistry, PoolingParams, SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, PoolingRequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from models.registry import read_config
from yatt_mm.rollout import classifiers, plugin, vllm_environment
from yatt_mm.rollout.engine_inputs import InputBuilder
from yatt_mm.rollout.engine_types import EngineConfig, GenerateRequest

__all__ = [
    "InputBuilder",
    "is_cpu",
    "label_logits_of",
    "logprobs_of",
    "params_of",
    "scored_logprobs_of",
    "sleep_level",
    "start_llm",
    "versions_of",
]

FREE_FRAC = 0.01
"""The share of a GPU's memory that must be free at the start, or vLLM fails. It is small, because `kv_cache_bytes` sets
the size of the cache, and other roles hold memory on the same GPU."""


def is_cpu() -> bool:
    """Return True if the engines of this process compute on the CPU."""
    return bool(current_platform.is_cpu())


def sleep_level(llm: AsyncLLM, *, can_reload: bool) -> int:
    """Return vLLM's sleep level: 0 frees nothing, 1 moves the weights to host memory, 2 drops weights.

    `can_reload`: the weights can be read again. Quantised weights are never dropped, because the files do not contain
    them in the form in which they are used.
    """
    if is_cpu():
        return 0
    return 2 if can_reload and llm.model_config.quantization is None else 1


def start_llm(config: EngineConfig) -> AsyncLLM:
    """Start vLLM and wait until it is ready. Must run inside `vllm_environment.spawning`.

    The executor is given as a class, because vLLM 0.32 on the CPU replaces the name "uni" by a separate process for the
    worker. That process would import torch and vLLM again, and one worker gains nothing from it. Prompts are never
    chunked on the CPU: after each chunk vLLM 0.32 rewinds the sample's random generator, but torch's CPU generators
    cannot be rewound, and the engine dies.
    """
    max_num_batched_tokens = config.max_num_batched_tokens
    if is_cpu():
        vllm_environment.run_eagerly()
        max_num_batched_tokens = max(
            max_num_batched_tokens, config.max_model_len
        )  # prompts are not chunked, see the docstring
        _register_loaded_model(config)
    args = AsyncEngineArgs(
        model=config.model_dir,
        served_model_name=config.name,
        dtype=cast(Any, config.dtype),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=not is_cpu(),
        kv_cache_memory_bytes=config.kv_cache_bytes,
        gpu_memory_utilization=FREE_FRAC,
        block_size=cast(Any, config.block_size),
        enforce_eager=is_cpu(),
        enable_sleep_mode=not is_cpu(),
        tensor_parallel_size=config.tensor_parallel_size,
        distributed_executor_backend=UniProcExecutor if config.tensor_parallel_size == 1 else "mp",
        limit_mm_per_prompt={"image": config.max_images_per_prompt, "video": config.max_videos_per_prompt},
        mm_processor_cache_gb=config.media_cache_bytes / 2**30,
        mm_device_do_normalize=config.normalize_on_device,
        skip_mm_profiling=True,
        logprobs_mode="processed_logprobs",
        weight_transfer_config=cast(Any, {"backend": plugin.BACKEND}),
        disable_log_stats=True,
        enable_log_requests=False,
        **(classifiers.engine_args(config) if config.num_labels is not None else {}),
    )
    return AsyncLLM.from_engine_args(args)


def _register_loaded_model(config: EngineConfig) -> None:
    """Register the model's class already imported, so that vLLM starts no extra process to inspect it.

    The class is imported in this process anyway, and on the CPU its import initialises no device.
    """
    plugin.register()
    hf_config = read_config(Path(config.model_dir))
    is_classifier = config.num_labels is not None
    for name in [classifiers.architecture(hf_config)] if is_classifier else hf_config.get("architectures", ()):
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def params_of(request: GenerateRequest, sample: int) -> SamplingParams | PoolingParams:
    """Return vLLM's parameters of one sample; for a classifier (`max_tokens` 0), logits without an activation."""
    if request.max_tokens == 0:
        return PoolingParams(task="classify", use_activation=False)
    return _sampling_params(request, sample)


def _sampling_params(request: GenerateRequest, sample: int) -> SamplingParams:
    """Return vLLM's sampling parameters. In training, the distribution is the one that the trainer assumes: a
    temperature and nothing else."""
    is_limited = not request.greedy
    return SamplingParams(
        max_tokens=request.max_tokens - len(request.tokens_begun(sample)),
        temperature=0.0 if request.greedy else request.temperature,
        top_p=request.top_p if is_limited else 1.0,
        top_k=request.top_k if is_limited else 0,
        min_p=request.min_p if is_limited else 0.0,
        stop=list(request.stop),
        include_stop_str_in_output=True,
        seed=None if request.greedy else request.seeds[sample],
        logprobs=len(request.scored_token_ids),  # for the scored tokens; vLLM always adds the sampled token
        logprob_token_ids=list(request.scored_token_ids) or None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        detokenize=bool(request.stop),
    )


def logprobs_of(output: CompletionOutput) -> tuple[float, ...]:
    """Return [T] the log-probability of each sampled token."""
    rows = cast(list[dict[int, Logprob]], output.logprobs)
    return tuple(row[token].logprob for token, row in zip(output.token_ids, rows, strict=True))


def scored_logprobs_of(output: CompletionOutput, token_ids: Sequence[int]) -> tuple[float, ...]:
    """Return, for each of `token_ids`, the log-probability that it is the first token of the response; () if no token
    was sampled."""
    if not token_ids or not output.token_ids:
        return ()
    first = cast(list[dict[int, Logprob]], output.logprobs)[0]
    return tuple(first[token].logprob for token in token_ids)


def versions_of(output: CompletionOutput) -> tuple[int, ...]:
    """Return [T] the version of the weights that sampled each token."""
    spans = output.weight_versions or []
    return tuple(int(span.version) for span in spans for _ in range(span.start, span.end))


def label_logits_of(output: PoolingRequestOutput) -> tuple[float, ...]:
    """Return [num_labels] the logits of the head; () if the request was aborted."""
    return tuple(output.outputs.data.flatten().tolist())
