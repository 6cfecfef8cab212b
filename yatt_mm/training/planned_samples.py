"""The samples of a step's plan, read from the data plane: tokens of the groups' records, and the patches that this rank
encodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from yatt_mm.protocol import group_record
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.training.step_plan import PlannedSample, UpdatePlan
from yatt_mm.training.train_sample import SampledTokens, TrainSample

Samples = list[list[TrainSample]]
"""[microbatch] the samples of one minibatch."""
OwnMedia = Callable[[Sequence[TrainSample]], list[tuple[bool, ...]]]
"""The type of `TrainEngine.own_media`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a rank trains in a step."""

    minibatches: list[Samples]
    """[minibatch] its samples."""
    media: list[Ref]
    """The refs of the patches that this rank encodes."""

    @property
    def nbytes(self) -> int:
        """The bytes of those patches."""
        return sum(ref.nbytes for ref in self.media)

    def far_nbytes(self, node_id: str) -> int:
        """Return the bytes of the patches whose home is another node than this one, each counted once."""
        return sum(ref.nbytes for ref in set(self.media) if ref.node != node_id)


def resolve_plan(
    plan: UpdatePlan, reader: Reader, own_media: OwnMedia, *, policy_version: int, is_corrected: bool
) -> Resolved:
    """Return the plan's samples, with the patches that this rank encodes. `policy_version`: that of the weights before
    the update. `is_corrected`: see `SampledTokens`."""
    views = reader.resolve([group.ref for group in plan.groups])
    groups = [_Group(ref, group_record.decode(view), [None] * len(ref.media)) for ref, view in zip(plan.groups, views)]
    minibatches = [
        [
            [
                groups[planned.group].sample(planned, policy_version=policy_version, is_corrected=is_corrected)
                for planned in micro
            ]
            for micro in minibatch.microbatches
        ]
        for minibatch in plan.minibatches
    ]
    wanted = _wanted_media(plan, minibatches, own_media)
    refs = [plan.groups[group].media[place] for group, place in wanted]
    for (group, place), patches in zip(wanted, reader.resolve(refs), strict=True):
        groups[group].patches[place] = patches
    return Resolved(minibatches=minibatches, media=refs)


@dataclass(frozen=True, slots=True)
class _Group:
    """A resolved group: what all its samples share."""

    ref: GroupRef
    record: group_record.GroupRecord
    patches: list[np.ndarray | None]
    """uint8 patches per medium; None for those that other ranks encode."""

    def sample(self, planned: PlannedSample, *, policy_version: int, is_corrected: bool) -> TrainSample:
        """Return one row in the form that the training engine takes. `policy_version`: the weights at the start of the
        step. `is_corrected`: see `SampledTokens`."""
        prompt, response = self.record.prompt_token_ids, self.record.samples[planned.row]
        num_prompt, num_sampled = len(prompt), len(response.token_ids)
        return TrainSample(
            token_ids=np.concatenate([prompt, response.token_ids]),
            loss_mask=np.arange(num_prompt + num_sampled) >= num_prompt,
            grid_thw=tuple(tuple(ref.meta["grid_thw"]) for ref in self.ref.media),
            # images have no time; only the data plane's videos say how far apart their frames are
            seconds_per_grid=tuple(ref.meta.get("second_per_grid_t", 1.0) for ref in self.ref.media),
            patches=self.patches,
            media_keys=tuple(ref.name for ref in self.ref.media),
            sampled=SampledTokens(
                weights=np.full(num_sampled, planned.token_weight, dtype=np.float32),
                advantages=np.full(num_sampled, planned.advantage, dtype=np.float32),
                rollout_logprobs=response.logprobs,
                is_stale=response.policy_versions < policy_version,
                is_corrected=is_corrected,
            ),
        )


def _wanted_media(plan: UpdatePlan, minibatches: Sequence[Samples], own_media: OwnMedia) -> list[tuple[int, int]]:
    """Return (group, place) of every medium that this rank encodes in some microbatch of the step."""
    wanted: set[tuple[int, int]] = set()
    for minibatch, samples in zip(plan.minibatches, minibatches, strict=True):
        for planned, micro in zip(minibatch.microbatches, samples, strict=True):
            for sample, is_own in zip(planned, own_media(micro), strict=True):
                wanted.update((sample.group, place) for place, own in enumerate(is_own) if own)
    return sorted(wanted)
