"""Tests of the policy losses against those of TRL, on the same tensors, where both have the same formula."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from yatt_mm.algorithms.correction import READS, correct
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.losses import policy_loss
from yatt_mm.algorithms.settings import AlgorithmSettings, CorrectionSettings, KlSettings
from yatt_mm.algorithms.table import ALGORITHMS
from yatt_mm.algorithms.token_weights import UpdateWeights, Weighting

pytestmark = pytest.mark.parity
LENGTHS = [5, 1, 3, 8]
MAX_TOKENS = 10


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    @staticmethod
    def gather(values: torch.Tensor) -> torch.Tensor:
        return values

    @staticmethod
    def reduce(values: torch.Tensor, reduction: str) -> torch.Tensor:
        return values


def trainer(
    logprobs: torch.Tensor, *, loss_type: str, level: str, delta: float | None, beta: float = 0.0, **settings: Any
) -> Any:
    """Return what TRL's loss reads of its trainer, whose model gives these log-probabilities."""
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=settings["low"],
        epsilon_high=settings["high"],
        args=SimpleNamespace(delta=delta, steps_per_generation=1, use_bias_correction_kl=False),
        use_vllm="ratio" in settings,
        vllm_importance_sampling_correction="ratio" in settings,
        current_gradient_accumulation_steps=1,
        model=SimpleNamespace(training=True),
        max_completion_length=MAX_TOKENS,
        accelerator=Accelerator(),
        _metrics={"train": defaultdict(list)},
        _entropy_bonus_enabled=False,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
    )


TIGHT = {"clip_low": 0.05, "clip_high": 0.05}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "GRPO": ("grpo", {"token_weights": "sequence_mean"}, {"loss_type": "grpo"}),
    "Dr. GRPO": ("dr_grpo", {}, {"loss_type": "dr_grpo"}),
    "DAPO": ("dapo", {}, {"loss_type": "dapo"}),
    "two-sided clipping": ("dapo", {"dual_clip": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "GSPO": ("gspo", TIGHT, {"loss_type": "grpo", "level": "sequence", "low": 0.05, "high": 0.05}),
    "CISPO": ("cispo", {}, {"loss_type": "cispo", "high": 1.3}),
    "DAPO, corrected": ("dapo", {"correction": "tis"}, {"loss_type": "dapo"}),
    "GRPO near a reference": (
        "grpo",
        {"token_weights": "sequence_mean", "kl": 0.3},
        {"loss_type": "grpo", "beta": 0.3},
    ),
    "CISPO, with masks": ("cispo", {"correction": "icepop"}, {"loss_type": "cispo", "high": 1.3}),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_trl(case: str) -> None:
    pytest.importorskip("trl.trainer.grpo_trainer", reason="the extra parity is not installed", exc_type=ImportError)
    from trl.trainer.grpo_trainer import GRPOTrainer

    name, ours_alone, theirs = CASES[case]
    given = dict(ours_alone)
    kind = given.pop("correction", None)
    kl = KlSettings(where="loss", coef=given.pop("kl")) if "kl" in given else KlSettings()
    random = torch.Generator().manual_seed(3)
    drawn = torch.randn(4, len(LENGTHS), max(LENGTHS), dtype=torch.float64, generator=random)
    logprobs, old, engine, reference = drawn * 0.4 - 1
    advantages = torch.tensor([1.5, -0.5, -1.0, 0.7], dtype=torch.float64)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    correction = CorrectionSettings(kind=kind, **READS[kind]) if kind else CorrectionSettings()
    entry = ALGORITHMS[name]
    settings = AlgorithmSettings(
        name=name,
        **{
            "token_weights": entry.token_weights,
            "clip_low": 0.2,
            "clip_high": 0.3,
            "correction": correction,
            "kl": kl,
            **given,
        },
    )
    responses = [(length, "stop") for length in LENGTHS]
    weights = UpdateWeights.of(Weighting(kind=settings.token_weights, max_tokens=MAX_TOKENS), responses)
    inputs = LossInputs(
        weights=torch.tensor(
            [weights.of_response(*one) for one in responses for _ in range(one[0])], dtype=torch.float64
        ),
        advantages=advantages[:, None].expand_as(mask)[mask],
        old_logprobs=old[mask],
        is_current=torch.zeros(sum(LENGTHS), dtype=torch.bool),
        rollout_logprobs=engine[mask],
        reference_logprobs=reference[mask],
        sequences=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        num_sequences=len(LENGTHS),
    )
    ours = logprobs[mask].requires_grad_()
    loss, metrics = policy_loss(ours, torch.zeros_like(ours), inputs, surrogate=entry.surrogate, settings=settings)
    if name != "cispo" or kind is None:
        assert 0 < float(metrics["clip_frac"]) < 1, "a clip binds on some tokens"

    padded = logprobs.clone().requires_grad_()
    columns: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }
    if kind:
        ratio = torch.zeros_like(logprobs)
        ratio[mask] = correct(old[mask], inputs, correction).weights
        columns["importance_sampling_ratio"] = ratio
        assert 0 < float(metrics["cut_frac"]) < 1, "a bound binds on some tokens"
        theirs = {**theirs, "ratio": True}
    stand_in = trainer(padded, **{"level": "token", "delta": None, "low": 0.2, "high": 0.3, **theirs})
    wanted = GRPOTrainer._compute_loss(stand_in, None, columns)
    wanted.backward()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-12)
    assert ours.grad is not None and padded.grad is not None
    torch.testing.assert_close(ours.grad, padded.grad[mask], rtol=1e-10, atol=1e-12)
