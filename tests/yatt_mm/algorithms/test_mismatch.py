"""Tests of what a difference between engine and trainer does to the gradient, and what a correction brings back.

The policy is so small that every response can be written down: gradients are means over all responses, not over a
sample of them.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from yatt_mm.algorithms.correction import READS, effective_share
from yatt_mm.algorithms.loss_inputs import LossInputs
from yatt_mm.algorithms.losses import clipped, policy_loss
from yatt_mm.algorithms.settings import AlgorithmSettings, CorrectionSettings

NUM_WORDS, LENGTH = 5, 4
RESPONSES = torch.tensor(list(itertools.product(range(NUM_WORDS), repeat=LENGTH)))
"""[625, 4] all responses."""


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS = drawn(NUM_WORDS + 1, NUM_WORDS, seed=0)
"""The policy: [word before, or none] the logits of the next word."""
REWARDS = drawn(len(RESPONSES), seed=1)


def logprobs_of(logits: torch.Tensor) -> torch.Tensor:
    """Return [response, token]."""
    before = torch.cat([torch.full((len(RESPONSES), 1), NUM_WORDS), RESPONSES[:, :-1]], 1)
    return logits.log_softmax(-1)[before, RESPONSES]


def gradient(engine: torch.Tensor, correction: CorrectionSettings) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean gradient, and the metrics, of a loss on responses that an engine with these logits samples."""
    logits = LOGITS.clone().requires_grad_()
    logprobs, sampled = logprobs_of(logits), logprobs_of(engine)
    chances = sampled.sum(1).exp()
    mean = (logprobs_of(LOGITS).sum(1).exp() * REWARDS).sum()
    number = torch.arange(len(RESPONSES)).repeat_interleave(LENGTH)
    inputs = LossInputs(
        weights=chances[number] / LENGTH,
        advantages=(REWARDS - mean)[number],
        old_logprobs=logprobs.detach().flatten(),
        is_current=torch.ones(len(number), dtype=torch.bool),
        rollout_logprobs=sampled.flatten(),
        sequences=number,
        num_sequences=len(RESPONSES),
    )
    settings = AlgorithmSettings(correction=correction)
    loss, metrics = policy_loss(
        logprobs.flatten(), torch.zeros(len(number)), inputs, surrogate=clipped, settings=settings
    )
    (found,) = torch.autograd.grad(loss, logits)
    return found, {name: float(value) for name, value in metrics.items()}


def degrees(one: torch.Tensor, other: torch.Tensor) -> float:
    cosine = torch.cosine_similarity(one.flatten(), other.flatten(), dim=0)
    return math.degrees(math.acos(float(cosine.clamp(-1, 1))))


def kind(name: str, level: str) -> CorrectionSettings:
    return CorrectionSettings(**{"kind": name, **READS[name], "level": level})


PLAIN = CorrectionSettings()
UNBIASED, _ = gradient(LOGITS, PLAIN)
ENGINES = {
    "temperature off by 2 %": LOGITS / 1.02,
    "weights one step old": LOGITS + 2.0 * UNBIASED,
    "so old that bounds bind": LOGITS + 30.0 * UNBIASED,
}
"""[what is wrong] the logits of the engine. A step goes against the gradient, so older weights are the other way."""


NEAR = list(ENGINES)[:2]
FAR = list(ENGINES)[2]


def angle(wrong: str, correction: CorrectionSettings) -> float:
    """Return the degrees between the gradient with an engine that is wrong and the one with an engine that is not."""
    return degrees(gradient(ENGINES[wrong], correction)[0], UNBIASED)


@pytest.mark.parametrize("wrong", NEAR)
@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_a_correction_brings_the_gradient_back(name: str, wrong: str) -> None:
    plain, of_tokens, of_responses = (angle(wrong, one) for one in (PLAIN, kind(name, "token"), kind(name, "sequence")))
    assert 0.1 < of_tokens < 0.9 * plain
    assert of_responses < 1e-4, "ratios of whole responses that are not cut leave no bias"


def test_far_away_truncation_keeps_some_bias_and_leaving_out_whole_responses_has_more_than_it_takes() -> None:
    plain = angle(FAR, PLAIN)
    for correction in (kind("tis", "token"), kind("tis", "sequence"), kind("icepop", "token")):
        assert 1.0 < angle(FAR, correction) < 0.95 * plain
    assert angle(FAR, kind("icepop", "sequence")) > 2 * plain, "its default bounds are for tokens"


@pytest.mark.parametrize(
    ("wrong", "mismatch"), [("temperature off by 2 %", 1.43e-4), ("weights one step old", 9.24e-4)]
)
def test_the_metrics_show_what_is_wrong(wrong: str, mismatch: float) -> None:
    right, found = (gradient(engine, kind("tis", "token"))[1] for engine in (LOGITS, ENGINES[wrong]))
    assert right["mismatch_k3"] == pytest.approx(0.0, abs=1e-15)
    assert effective_share(right["correction_mean"], right["correction_squares"]) == pytest.approx(1.0)
    assert found["mismatch_k3"] == pytest.approx(mismatch, rel=0.01)
    assert effective_share(found["correction_mean"], found["correction_squares"]) < 0.9999 and found["cut_frac"] == 0.0


def test_the_metrics_show_what_is_cut() -> None:
    found = gradient(ENGINES[FAR], kind("tis", "token"))[1]
    assert found["cut_frac"] > 0.01
