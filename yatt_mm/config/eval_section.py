"""The keys of evaluation: when, on which sets, how responses are sampled, and what is measured."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from yatt_mm.config.data_section import FieldsSection
from yatt_mm.config.values import Count, Section
from yatt_mm.config.wanted import NAME
from yatt_mm.protocol.control import HELD_OUT

METRIC = re.compile(r"(mean|pass|maj)@([1-9][0-9]*)")


class EvalSetSection(Section):
    """A held-out set with a name."""

    path: str
    """The set's files, as `data.eval` names them."""
    fields: FieldsSection = FieldsSection()
    reward: str | None = None
    """The set's own reward function; by default `reward.function`."""
    num_prompts: Annotated[int, Field(ge=0)] = 0
    """The prompts of an evaluation, from the beginning of the set; 0 takes all of them."""
    num_samples: Count = 1
    """Responses per prompt."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """The temperature of these responses; 0 takes the most likely token (greedy)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Only the most likely tokens are sampled that together have this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only this many of the most likely tokens are sampled; 0 sets no limit."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Only tokens are sampled whose probability is at least this share of the most likely token's."""
    metrics: list[str] = []
    """What is measured besides `accuracy`: `mean@k`, `pass@k` and `maj@k`, with k up to `num_samples`."""

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: list[str]) -> list[str]:
        for name in metrics:
            if METRIC.fullmatch(name) is None:
                raise ValueError(f"{name} is no metric; wanted mean@k, pass@k or maj@k, such as pass@4")
        return metrics

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name in self.metrics:
            if int(name.partition("@")[2]) > self.num_samples:
                raise ValueError(f"{name} needs num_samples of at least its k; it is {self.num_samples}")
        if self.num_samples > 1 and not self.temperature:
            raise ValueError(
                f"num_samples is {self.num_samples} and temperature 0, which gives the same response each time; raise "
                "temperature"
            )
        return self


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """The steps between evaluations; 0 evaluates only before and after training."""
    sets: dict[Annotated[str, Field(pattern=NAME)], EvalSetSection] = {}
    """Held-out sets by name, besides `data.eval` or instead of it."""
    keep_best: str | None = None
    """The metric, such as `eval/accuracy` or `eval/charts/pass@8`, whose highest value after training begins keeps its
    checkpoint, whatever `checkpoint.keep` says, and its model as a Hugging Face folder (`best`)."""

    @field_validator("sets")
    @classmethod
    def _check_names(cls, sets: dict[str, EvalSetSection]) -> dict[str, EvalSetSection]:
        if HELD_OUT in sets:
            raise ValueError(f"a set is called {HELD_OUT}, as that of data.eval is; call it something else")
        return sets

    @model_validator(mode="after")
    def _check_best(self) -> Self:
        known = ["eval/accuracy"]
        for name, section in self.sets.items():
            known += [f"eval/{name}/{metric}" for metric in ("accuracy", *section.metrics)]
        if self.keep_best is not None and self.keep_best not in known:
            raise ValueError(f"keep_best is {self.keep_best}; wanted one of {', '.join(known)}")
        return self


def held_out_key_of(name: str) -> str:
    """Return the key of the config that names a held-out set."""
    return "data.eval" if name == HELD_OUT else f"eval.sets.{name}"
