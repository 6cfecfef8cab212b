"""Measures how fast one engine is, as the numbers that the simulator needs (`rollout:` and `genrm:` of
configs/simulate).

Trials answer different numbers of prompts with different numbers of samples, tokens and pixels, through the data plane
and a real engine, as a rollout actor does. Five costs are fitted to the times (non-negative least squares of relative
errors): of a decode step, of each sequence in it, of a prompt's token, of a patch, and of a request.

    python -m benchmarks.engine_speeds MODEL_FOLDER [--json] [--core 1] [--dtype bfloat16] [--tp 2] [--max-tokens 48]

Make a model folder first, for example with: python -m examples.judge.prepare
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not __package__:  # run by its path
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
from PIL import Image
from scipy.optimize import nnls

from benchmarks.common.runs import parser, show
from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from models.registry import load_recipe, read_config
from yatt_mm.common.conversation import ask
from yatt_mm.config.values import parse_size
from yatt_mm.protocol.rollout import GroupRef, PromptTask, SamplingSettings
from yatt_mm.rollout.vllm_engine import EngineConfig, GenerateRequest, VllmEngine
from yatt_mm.rollout.worker import RolloutWorker

COSTS = ("decode_fixed_s", "decode_per_sequence_s", "prefill_per_token_s", "vision_per_patch_s", "request_s")
NUM_GROUPS = (1, 8, 32)
NUM_SAMPLES = (1, 8)
NUM_WORDS = (4, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One call of the engine: how many prompts, samples, tokens and pixels it has."""

    num_groups: int
    num_samples: int
    max_tokens: int
    side: int
    """The side of the prompts' square images, in pixels."""
    words: int
    """The number of tokens of each prompt's question."""


def main() -> None:
    """Start an engine, run the trials, fit the costs, and print them."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("model", type=Path, help="a Hugging Face folder")
    arguments.add_argument("--core", type=int, help="processor core for the engine (default: any)")
    arguments.add_argument("--max-tokens", type=int, default=48, help="of the longest responses")
    arguments.add_argument("--side", type=int, nargs=2, default=(28, 112), help="pixels of small and large images")
    arguments.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights (float32)")
    arguments.add_argument("--tp", type=int, default=1, help="devices of the engine (1)")
    arguments.add_argument("--kv-cache", default="1GiB", help="must hold 256 of the longest responses (1GiB)")
    arguments.add_argument("--repeats", type=int, default=1, help="rounds after the first; a trial's fastest counts")
    options = arguments.parse_args()
    lengths = sorted({1, max(2, options.max_tokens // 4), options.max_tokens})
    trials = [
        Trial(num_groups=groups, num_samples=samples, max_tokens=tokens, side=side, words=words)
        for groups, samples, tokens, side, words in itertools.product(
            NUM_GROUPS, NUM_SAMPLES, lengths, options.side, NUM_WORDS
        )
    ]
    with EmbeddedNode(memory_bytes=2**28, roots={}, num_workers=1) as node, Client(node.uri) as client:
        if options.core is not None:
            os.sched_setaffinity(0, {options.core})
        rows, seconds = asyncio.run(measure(engine_config(options), trials, options.repeats, client))
    relative = rows / seconds[:, None]
    costs, _ = nnls(relative, np.ones(len(rows)))
    errors = np.abs(relative @ costs - 1.0)
    table = [{"path": name, "seconds": float(cost)} for name, cost in zip(COSTS, costs)]
    table.append({"path": "error of the fit: mean, largest", "seconds": float(errors.mean()), "": float(errors.max())})
    title = f"Costs of an engine of {options.model}, {options.dtype}, tp {options.tp}, {len(trials)} trials"
    show(title, table, as_json=options.json)


def engine_config(options: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings of a run, with room for the longest trial."""
    hf_config = read_config(options.model)
    positions = {**hf_config, **hf_config.get("text_config", {})}.get("max_position_embeddings", 4096)
    return EngineConfig(
        model_dir=str(options.model),
        name="speeds",
        dtype=options.dtype,
        tensor_parallel_size=options.tp,
        kv_cache_bytes=parse_size(options.kv_cache),
        max_model_len=min(4096, positions),
    )


async def measure(
    config: EngineConfig, trials: Sequence[Trial], repeats: int, client: Client
) -> tuple[np.ndarray, np.ndarray]:
    """Return [N, 5] how often each trial pays each of `COSTS`, and [N] its seconds."""
    fresh = itertools.count()
    with Reader(client.uri) as reader:
        engine = await VllmEngine.start(config)
        never_end()
        worker = RolloutWorker(engine, client, reader)
        try:
            best: dict[Trial, tuple[float, np.ndarray]] = {}
            for _ in range(1 + repeats):
                for trial in trials:
                    tasks = list(make_tasks(trial, Path(config.model_dir), client, fresh))
                    began_s = time.perf_counter()
                    sampling = SamplingSettings(max_tokens=trial.max_tokens)
                    groups = await asyncio.gather(*(worker.generate(task, sampling) for task in tasks))
                    seconds = time.perf_counter() - began_s
                    if trial not in best or seconds < best[trial][0]:
                        best[trial] = seconds, paid(groups)
        finally:
            await worker.engine.shutdown()
    return np.stack([row for _, row in best.values()]), np.array([seconds for seconds, _ in best.values()])


def never_end() -> None:
    """Make all responses reach their maximum length, whatever the model would do."""
    from yatt_mm.rollout import vllm_backend

    params_of = vllm_backend.params_of

    def endless(request: GenerateRequest, sample: int) -> Any:
        params = params_of(request, sample)
        params.ignore_eos = True
        return params

    vllm_backend.params_of = endless


def make_tasks(trial: Trial, model_dir: Path, client: Client, fresh: Iterator[int]) -> Iterator[PromptTask]:
    """Yield prompts that are in no cache yet."""
    recipe = load_recipe(model_dir).patch_recipe(model_dir)
    for number in itertools.islice(fresh, trial.num_groups):
        pixels = np.random.default_rng(number).integers(0, 256, (trial.side, trial.side, 3), dtype=np.uint8)
        png = io.BytesIO()
        Image.fromarray(pixels).save(png, format="PNG")
        (ref,) = client.derive([client.put_source(png.getvalue())], recipe)
        assert isinstance(ref, Ref), ref
        question = " ".join(["what"] * trial.words)
        yield PromptTask(
            slot=number,
            conversation=ask(question, ["image"]),
            media=(ref,),
            num_samples=trial.num_samples,
            seed=number,
            name=f"speeds/{number}",
        )


def paid(groups: Sequence[GroupRef]) -> np.ndarray:
    """Return [5] how often these groups pay each of `COSTS`, by the rule of the simulator: a prompt is read once, and
    all sequences decode together."""
    lengths = [length for group in groups for length in group.lengths]
    patches = sum(int(np.prod(ref.shape[:-1])) for group in groups for ref in group.media)
    prompts = sum(group.num_prompt_tokens for group in groups)
    return np.array([max(lengths), sum(lengths), prompts, patches, len(lengths)], dtype=np.float64)


if __name__ == "__main__":
    main()
