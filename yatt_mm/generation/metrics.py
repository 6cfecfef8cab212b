"""What the metrics of one step are made of: groups, updates, moved memory. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from yatt_mm.algorithms.advantages import has_signal
from yatt_mm.algorithms.correction import effective_share
from yatt_mm.batching.step_batches import RoundOutcome
from yatt_mm.protocol.control import TRAIN, ScoredGroup
from yatt_mm.protocol.faults import FUNCTION
from yatt_mm.protocol.step_meter import StepMeter
from yatt_mm.protocol.training import MovedMemory, UpdateReport


def add_groups(meter: StepMeter, groups: Sequence[ScoredGroup], *, step: int, min_reward_range: float) -> None:
    """Add the metrics of one step's responses. `min_reward_range`: see `yatt_mm.algorithms.advantages.has_signal`."""
    several = {group.prompt.slot.set_name for group in groups} - {TRAIN}  # a list of sets has no such name
    for group in groups:
        rewards, lengths = group.rewards, group.group.lengths
        meter.add_mean("reward/mean", sum(rewards), len(rewards))
        meter.add_mean("reward/has_signal_frac", float(has_signal(rewards, min_range=min_reward_range)), 1)
        meter.add_sum("reward/num_errors", group.num_failed(FUNCTION))
        meter.add_sum("rollout/num_tokens", sum(lengths))
        meter.add_mean("rollout/length_mean", sum(lengths), len(lengths))
        meter.add_mean("rollout/truncated_frac", group.group.finish_reasons.count("length"), len(lengths))
        meter.add_max("rollout/staleness_max", step - 1 - min(low for low, _ in group.group.policy_versions))
        for name, values in group.parts.items():
            meter.add_given(f"reward/{name}/mean", values)
        if (name := group.prompt.slot.set_name) in several:
            meter.add_sum(f"sets/{name}/num_prompts", 1)
            meter.add_mean(f"sets/{name}/reward_mean", sum(rewards), len(rewards))
            meter.add_mean(f"sets/{name}/has_signal_frac", float(has_signal(rewards, min_range=min_reward_range)), 1)
            meter.add_mean(f"sets/{name}/length_mean", sum(lengths), len(lengths))


def add_advantages(meter: StepMeter, kept: Sequence[ScoredGroup]) -> None:
    """Add from how many of the groups of a full batch something is learned."""
    for group in kept:
        meter.add_mean("reward/has_advantage_frac", float(any(group.advantages)), 1)


def add_sampling(meter: StepMeter, outcome: RoundOutcome, num_rounds: int) -> None:
    """Add how a step's batch was filled. One controller adds it, because all know the same."""
    meter.add_sum("sampling/num_prompts_used", outcome.num_prompts_used)
    meter.add_sum("sampling/num_groups", len(outcome.kept))
    meter.add_sum("sampling/num_rejected", outcome.num_rejected)
    meter.add_sum("sampling/num_carried", len(outcome.carried))
    meter.add_sum("sampling/num_rounds", num_rounds)


def add_update(meter: StepMeter, report: UpdateReport) -> None:
    """Add what one training rank reported of a step."""
    meter.add_sum("dataplane/resolved_bytes", report.resolved_bytes)
    if report.far_bytes is not None:
        meter.add_sum("hosts/media_needed_bytes", report.far_bytes)
    meter.add_max("train/resolved_bytes_max", report.resolved_bytes)
    meter.add_mean("train/resolves_frac", float(report.resolved_bytes > 0), 1)
    meter.add_max("train/num_skipped", report.num_skipped)
    if not report.is_loss_rank:
        return
    for name, value in report.loss_metrics.items():
        meter.add_sum(f"train/{name}", value)
    if report.loss_metrics:
        meter.add_max("train/grad_norm", report.grad_norm)
    for name, value in report.critic_metrics.items():
        meter.add_sum(f"critic/{name}", value)
    for name, value in report.critic_values.items():
        meter.add_max(f"critic/{name}", value)
    meter.add_max("time/update_s", report.seconds)
    meter.add_mean("rollout/logprob_diff_mean", report.difference_sum, report.num_compared)
    meter.add_max("rollout/logprob_diff_max", report.difference_max)
    meter.add_mean("rollout/stale_tokens_frac", report.num_stale, report.num_compared + report.num_stale)


def finish_update(record: dict[str, float]) -> None:
    """Replace sums of the record of a step, which are those of all ranks, by the metric that they make together."""
    if (squares := record.pop("train/correction_squares", None)) is not None:
        record["train/ess_frac"] = effective_share(record["train/correction_mean"], squares)


def add_moves(meter: StepMeter, moves: Sequence[MovedMemory]) -> None:
    """Add what one change of the training ranks' state took: bytes of all ranks, seconds of the slowest."""
    meter.add_sum("train/released_bytes", sum(moved.released_bytes for moved in moves))
    meter.add_sum("train/restored_bytes", sum(moved.restored_bytes for moved in moves))
    meter.add_time("train/release_s", max((moved.release_s for moved in moves), default=0.0))
    meter.add_time("train/restore_s", max((moved.restore_s for moved in moves), default=0.0))


def add_judges(meter: StepMeter, metrics: Sequence[Mapping[str, float]]) -> None:
    """Add the metrics of the judges' engines."""
    meter.add_sum("genrm/ipc_bytes", sum(of_one["ipc_bytes"] for of_one in metrics))
    meter.add_sum("genrm/bytes_moved", sum(of_one["moved_bytes"] for of_one in metrics))


def resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
