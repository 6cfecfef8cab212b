"""The configuration of a run: one YAML file, one tree of typed models, and dotted overrides with the same checks.

Nothing heavy is imported here, and nothing is opened. Checks between keys, and checks that need
the disk, are in `yatt_mm.preflight.run_checks`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Self

import yaml
from pydantic import ValidationError, model_validator

from models.layout.parallel import Parallel
from yatt_mm.algorithms.table import has_critic
from yatt_mm.batching.dynamic_sampling import SamplingRule, Tail
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.reference_folders import FOLDER, ReferenceFolders
from yatt_mm.config.algorithm_section import AlgorithmSection, CriticSection, KlSection, ReferenceSection
from yatt_mm.config.data_section import DataSection
from yatt_mm.config.eval_section import EvalSection
from yatt_mm.config.sections import (
    CheckpointSection,
    ControllersSection,
    DataplaneSection,
    FaultsSection,
    ModelSection,
    PlacementSection,
    RaySection,
    RewardSection,
    RolloutSection,
    RolloutsSection,
    RunSection,
    SamplingSection,
    WeightsSection,
)
from yatt_mm.config.train_section import ParallelSection, TrainSection
from yatt_mm.config.values import Section
from yatt_mm.config.yaml_file import explain, read_tree
from yatt_mm.placement.policy import Bounds, Split
from yatt_mm.placement.rebalancer import CellDivision
from yatt_mm.protocol.control import HELD_OUT
from yatt_mm.protocol.placement_model import Engines, Placement, Role, cell_size, full_colocation, partial_colocation
from yatt_mm.protocol.published import Carrier

WITHOUT_CELLS = {
    "mode": "full_colocation",
    "rollout_devices": None,
    "min_rollout_devices": 0,
    "min_genrm_devices": 0,
}
"""What becomes of `placement` in an evaluation, where only engines of the policy work."""


class Config(Section):
    """The configuration of a whole run."""

    run: RunSection
    model: ModelSection
    reference: ReferenceSection = ReferenceSection()
    critic: CriticSection = CriticSection()
    data: DataSection
    dataplane: DataplaneSection = DataplaneSection()
    ray: RaySection = RaySection()
    placement: PlacementSection = PlacementSection()
    controllers: ControllersSection = ControllersSection()
    rollout: RolloutSection = RolloutSection()
    rollouts: RolloutsSection = RolloutsSection()
    reward: RewardSection = RewardSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    sampling: SamplingSection = SamplingSection()
    train: TrainSection
    weights: WeightsSection = WeightsSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    faults: FaultsSection = FaultsSection()

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if both := {one.name for one in self.data.train} & {HELD_OUT, *self.eval.sets}:
            raise ValueError(
                f"data.train and eval.sets both have a set called {min(both)}; give each set a name of its own"
            )
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> Self:
        if has_critic(self.algorithm.name) and self.train.lora.rank and self.critic.lr is None:
            raise ValueError(
                f"critic.lr is not set, and train.lr ({self.train.lr:g}) is that of LoRA's adapters; the critic has "
                "none, so set critic.lr to the rate of a run without LoRA, about a tenth"
            )
        return self

    @property
    def run_dir(self) -> Path:
        """The folder for everything that the run writes."""
        return Path(self.run.dir) / self.run.name

    @property
    def skipped_dir(self) -> Path:
        """The folder for what skipped steps were computed from."""
        return self.run_dir / "skipped"

    @property
    def log_dir(self) -> Path:
        """The folder for the logs of the run's processes."""
        return self.run_dir / "logs"

    @property
    def references(self) -> ReferenceFolders | None:
        """The folders of the reference models; None if nothing reads them."""
        if self.algorithm.kl.where == "none":
            return None
        return ReferenceFolders(
            first=Path(self.reference.path or self.model.path).absolute(),
            renewed=self.run_dir.absolute() / FOLDER,
            every=self.reference.renew_every,
        )

    @property
    def critic_path(self) -> str | None:
        """The folder of the model from which the critic begins; None if there is no critic."""
        return (self.critic.path or self.model.path) if has_critic(self.algorithm.name) else None

    def sampling_rule(self) -> SamplingRule:
        """Return the rule of how a step's batch is filled."""
        num_groups = self.train.prompts_per_step
        return SamplingRule(
            num_groups=num_groups,
            replaces_groups=self.sampling.replace_groups,
            max_prompts=math.ceil(num_groups * self.sampling.max_prompts_factor),
            over_dispatch=self.sampling.over_dispatch,
            tail=Tail(self.sampling.tail),
            deterministic=self.rollout.deterministic,
        )

    def for_evaluation(self, folder: Path) -> Config:
        """Return the config of an evaluation of `model.path` alone, which writes its results to a folder: without
        training sets, ranks and judges."""
        return self.model_copy(
            update={
                "run": self.run.model_copy(update={"dir": str(folder.parent), "name": folder.name}),
                "data": self.data.model_copy(update={"train": ()}),
                "algorithm": self.algorithm.model_copy(update={"kl": KlSection()}),
                "reference": ReferenceSection(),
                "critic": CriticSection(),
                "train": self.train.model_copy(update={"steps": 0, "parallel": ParallelSection()}),
                "reward": self.reward.model_copy(update={"judges": {}, "weight": 1.0}),
                "placement": self.placement.model_copy(update=WITHOUT_CELLS),
            }
        )

    @property
    def trains(self) -> bool:
        """False for an evaluation alone."""
        return bool(self.data.train)

    @property
    def is_partial(self) -> bool:
        """True if rollout and judges have separate devices in the generation phase."""
        return self.placement.mode == "partial_colocation"

    @property
    def carrier(self) -> Carrier:
        """The carrier of published weights. Engines that wake up inside a generation phase read them again, so they
        must stay readable."""
        return "shm" if self.is_partial and self.weights.carrier == "auto" else self.weights.carrier

    @property
    def judges_in_turn(self) -> bool:
        """True if judges work after all responses of a round are there, while engines sleep."""
        return bool(self.reward.judges) and not self.is_partial

    def make_placement(self) -> Placement:
        """Return which unit uses which device."""
        place = partial_colocation if self.is_partial else full_colocation
        section = self.placement
        placement = place(num_devices=section.num_devices, rollout=self.engines, judges=self.judges)
        placement = replace(placement, devices_per_host=section.devices_per_host)
        return placement if self.trains else placement.without(Role.TRAIN)

    @property
    def engines(self) -> Engines:
        """The engines of the policy."""
        return self._engines(self.rollout.num_engines, self.rollout.tp)

    @property
    def judges(self) -> dict[str, Engines]:
        """The engines of each judge, by the judge's name; `tp` is 0 for remote servers."""
        return {
            name: Engines(num=judge.num_engines, tp=0) if judge.url else self._engines(judge.num_engines, judge.tp)
            for name, judge in self.reward.judges.items()
        }

    @property
    def has_local_judges(self) -> bool:
        """True if some judge works on the run's devices."""
        return any(engines.tp for engines in self.judges.values())

    def _engines(self, num: int | None, tp: int) -> Engines:
        if num is None or self.is_partial:
            num = max(1, self.placement.num_devices // tp)
        return Engines(num=num, tp=tp)

    def division(self) -> CellDivision | None:
        """The rules for dividing devices in partial colocation; None in full colocation."""
        section = self.placement
        if not self.is_partial:
            return None
        size = cell_size(self.engines, self.judges.values())
        num = section.num_devices // size
        min_rollout, min_genrm = section.min_rollout_devices // size, section.min_genrm_devices // size
        half = min(max((num + 1) // 2, min_rollout), num - min_genrm)
        num_rollout = half if section.rollout_devices is None else section.rollout_devices // size
        if not self.has_local_judges:
            num_rollout = min_rollout = num
        return CellDivision(
            first=Split(rollout=num_rollout, genrm=num - num_rollout),
            bounds=Bounds(
                min_rollout=min_rollout,
                max_rollout=num - min_genrm,
                min_genrm=min_genrm,
                max_genrm=num - min_rollout,
                min_gain_frac=section.min_gain_frac,
            ),
            is_dynamic=section.dynamic and self.has_local_judges,
            decide_every_s=section.decide_every_s,
            is_replacing=self.sampling.replace_groups,
        )

    def requests_per_engine(self, group_size: int | None = None) -> dict[str, int]:
        """The number of groups that an engine gets at once, by pool of engines. `group_size`: the responses of a group,
        by default those of training."""
        rollout, size = self.rollout, group_size or self.rollout.group_size
        rooms = {"rollout": rollout.max_groups_per_engine or max(1, rollout.max_num_seqs // size)}
        for name, judge in self.reward.judges.items():
            num_seqs = size * judge.num_votes
            rooms[name] = judge.max_groups_per_engine or max(1, judge.max_num_seqs // num_seqs)
        return rooms

    def parallel(self) -> Parallel:
        """Return the layout of the training ranks, with `dp` filled in from the devices.

        Raises:
            ConfigError: the devices do not divide into that layout.
        """
        wanted, devices = self.train.parallel, self.placement.num_devices
        model_ranks = wanted.tp * wanted.pp * wanted.cp
        dp = wanted.dp if wanted.dp is not None else max(1, devices // model_ranks)
        if model_ranks * dp != devices:
            raise ConfigError(
                f"train.parallel asks for tp {wanted.tp} x pp {wanted.pp} x cp {wanted.cp} x dp {dp} = "
                f"{model_ranks * dp} ranks, but placement.num_devices is {devices}; make the product equal to "
                "the devices (dp may be left out)"
            )
        return Parallel(**{**wanted.model_dump(), "dp": dp})


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Config:
    """Read a YAML file, apply `dotted.key=value` overrides, and check everything.

    Raises:
        ConfigError: with every problem found, one per line.
    """
    try:
        return Config.model_validate(read_tree(path, overrides))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(problem, Config) for problem in error.errors())) from error


def dump_config(config: Config) -> str:
    """Return the resolved config as YAML. Loading it gives the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
