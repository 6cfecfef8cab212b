"""Tests of what the actors of a run are made with: each setting of the config comes to those that read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.lora.settings import LoraSettings
from yatt_mm.algorithms.settings import AlgorithmSettings, KlSettings
from yatt_mm.common.reference_folders import ReferenceFolders
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.hosts.run_node import RunNode
from yatt_mm.protocol.adam_settings import AdamSettings
from yatt_mm.protocol.rollout import EngineSpec
from yatt_mm.protocol.training import TrainSpec
from yatt_mm.rollout.engine_types import EngineConfig
from yatt_mm.runtime import makers
from yatt_mm.runtime.judge_actors import judge_engine_spec
from yatt_mm.runtime.makers import create_reward_workers, critic_spec, engine_spec, train_spec

DIGITS = Path(__file__).parents[3] / "configs" / "digits_cpu.yaml"
OPTIM = AdamSettings(
    lr=2e-4, weight_decay=0.1, betas=(0.9, 0.95), clip_grad=1.0, warmup_steps=7, part_lr={"tower": 1e-4}
)
NODE = RunNode(uri="grpc://127.0.0.1:1", scope="of the run", durable=True, journal_bytes=0, node=None)

ENGINE = EngineSpec(
    model_dir=str(Path("examples/digits/data/model").absolute()),
    dtype="bfloat16",
    max_model_len=300,
    max_num_seqs=5,
    kv_cache_bytes=64 << 20,
    max_images_per_prompt=3,
    max_videos_per_prompt=2,
    deadline_s=90,
    scope="of the run",
    durable=True,
    tp=2,
)
"""The settings of engines, none of which is a default."""


def config(*overrides: str) -> Config:
    return load_config(DIGITS, list(overrides))


def test_ranks_get_every_setting_of_training() -> None:
    found = train_spec(
        config(
            "run.name=wired",
            "run.seed=11",
            "model.dtype=bfloat16",
            "rollout.temperature=0.7",
            "algorithm={name: gspo, clip_low: 0.003, clip_high: 0.004, dual_clip: 3, entropy_coef: 0.02}",
            "algorithm.kl={where: loss, estimator: k2, coef: 0.05}",
            "algorithm.min_reward_range=0.25",
            "algorithm.token_weights=constant",
            "algorithm.overlong_filter=true",
            "reference={path: models/sft, renew_every: 3}",
            "train.steps=10",
            "train.num_minibatches=4",
            "train.warmup_steps=2",
            "train.weight_decay=0.2",
            "train.betas=[0.8, 0.9]",
            "train.clip_grad=2",
            "train.lr=3e-4",
            "train.lr_schedule=cosine_with_min_lr",
            "train.lr_final_frac=0.1",
            "train.part_lr={tower: 1e-4}",
            "train.recompute=full",
            "train.freeze=[merger]",
            "train.overlap_grad_reduce=true",
            "train.optimizer_offload_fraction=0.5",
            "dataplane.timeout_s=17",
            "controllers.deadline_s=90",
            "weights.carrier=nccl",
        ),
        num_receivers=3,
    )
    assert found == TrainSpec(
        model_dir=str(Path("examples/digits/data/model").absolute()),
        dtype="bfloat16",
        optim=AdamSettings(
            lr=3e-4,
            weight_decay=0.2,
            betas=(0.8, 0.9),
            clip_grad=2,
            warmup_steps=2,
            total_updates=40,
            lr_final_frac=0.1,
            schedule="cosine_with_min_lr",
            decay_updates=4,
            part_lr={"tower": 1e-4},
            offload_frac=0.5,
        ),
        temperature=0.7,
        algorithm=AlgorithmSettings(
            name="gspo",
            min_reward_range=0.25,
            token_weights="constant",
            overlong_filter=True,
            clip_low=0.003,
            clip_high=0.004,
            dual_clip=3,
            entropy_coef=0.02,
            kl=KlSettings(where="loss", estimator="k2", coef=0.05),
        ),
        seed=11,
        timeout_s=17,
        carrier="nccl",
        num_receivers=3,
        deadline_s=90,
        recompute="full",
        freeze=("merger",),
        overlap_grad_reduce=True,
        references=ReferenceFolders(
            first=Path("models/sft").absolute(), renewed=Path("runs/wired/reference").absolute(), every=3
        ),
        skipped_dir=str(Path("runs/wired/skipped").absolute()),
    )


def test_ranks_get_adapters_and_a_critic() -> None:
    assert train_spec(config(), num_receivers=1).lora is None
    lora = train_spec(config("train.lora={rank: 4, alpha: 8, targets: [language, tower]}"), num_receivers=1).lora
    assert lora == LoraSettings(rank=4, alpha=8, targets=("language", "tower"))
    ppo = config("algorithm.name=ppo")
    spec = train_spec(ppo, num_receivers=1)
    assert spec.critic is not None and spec.critic == critic_spec(ppo, spec.optim)


def test_engines_get_every_setting_of_generation() -> None:
    found = engine_spec(
        config(
            "model.dtype=bfloat16",
            "rollout.max_model_len=300",
            "rollout.max_num_seqs=5",
            "rollout.kv_cache_memory=64MiB",
            "rollout.max_images_per_prompt=3",
            "rollout.max_videos_per_prompt=2",
            "rollout.tp=2",
            "rollout.num_engines=1",
            "data.chat_template_args={enable_thinking: false}",
            "controllers.deadline_s=90",
        ),
        NODE,
    )
    assert found == replace(ENGINE, chat_template_args={"enable_thinking": False})


def test_engines_of_a_judge_get_its_own_settings_and_media_as_the_policy_has_them() -> None:
    judge = "{model: models/judge, max_model_len: 700, max_num_seqs: 6, kv_cache_memory: 32MiB, tp: 2, max_attempts: 4}"
    judged = config(
        "model.dtype=bfloat16",
        "rollout.max_images_per_prompt=3",
        "rollout.max_videos_per_prompt=2",
        "controllers.deadline_s=100",
        f"reward.judges.fair={judge}",
    )
    found = judge_engine_spec(judged, judged.reward.judges["fair"], NODE)
    assert found == replace(
        ENGINE,
        model_dir=str(Path("models/judge").absolute()),
        max_model_len=700,
        max_num_seqs=6,
        kv_cache_bytes=32 << 20,
        deadline_s=20,
    ), "all attempts together have four fifths of the controllers' deadline"


def test_the_settings_of_an_engine_are_those_of_its_spec() -> None:
    given = replace(ENGINE, num_labels=4)
    found = EngineConfig.of(given, name="fair")
    assert (found.name, found.tensor_parallel_size, found.answer_timeout_s) == ("fair", 2, 90)
    same = {field.name for field in fields(EngineConfig)} & {field.name for field in fields(EngineSpec)}
    assert {name: getattr(found, name) for name in same} == {name: getattr(given, name) for name in same}
    assert same >= {"dtype", "model_dir", "kv_cache_bytes", "num_labels"}


def test_a_critic_learns_like_the_policy_unless_it_has_a_rate_of_its_own() -> None:
    assert critic_spec(config(), OPTIM) is None
    ppo = config("algorithm.name=ppo")
    bare = critic_spec(ppo, OPTIM)
    assert bare is not None and bare.optim == OPTIM
    assert bare.model_dir == str(Path(ppo.model.path).absolute())
    own = critic_spec(config("algorithm.name=ppo", "critic={path: models/sft, lr: 1e-3}"), OPTIM)
    assert own is not None and own.model_dir == str(Path("models/sft").absolute())
    assert (own.optim.lr, own.optim.warmup_steps) == (1e-3, 7)
    assert own.optim.part_lr == pytest.approx({"tower": 5e-4}), "half of it, as in the policy"


def test_reward_workers_get_every_setting_of_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    def create(stack: None, body: type, **options: Any) -> Callable[..., dict[str, Any]]:
        return lambda **settings: settings

    monkeypatch.setattr(makers, "create", create)
    given = config(
        "reward.part_weights={a: 2}",
        "reward.part_ranges={a: [0, 1]}",
        "reward.deadline_s=3",
        "reward.num_workers=2",
        "controllers.deadline_s=90",
        "dataplane.timeout_s=17",
    )
    host = SimpleNamespace(uri=NODE.uri, placed=dict)
    site: Any = SimpleNamespace(config=given, stack=None, hosts=SimpleNamespace(of=lambda worker: host))
    wanted = {
        "functions": ("m:f",),
        "weights": {"a": 2.0},
        "ranges": {"a": (0.0, 1.0)},
        "dataplane_uri": NODE.uri,
        "timeout_s": 17,
        "deadline_s": 3,
        "longest_s": 30,
    }
    assert create_reward_workers(site, ("m:f",)) == [wanted] * 2
