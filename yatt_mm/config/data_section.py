"""The keys of a run's data: training sets, held-out set, and how their samples become prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from models.recipes.media_recipes import VideoSampling
from yatt_mm.config.values import Section
from yatt_mm.config.wanted import NAME
from yatt_mm.protocol.control import TRAIN


class VideoSection(Section):
    """Which frames of videos are used, their size, and who decodes them. The model's folder decides about frames and
    sizes that are not set here."""

    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Frames per second of video."""
    min_frames: Annotated[int, Field(ge=1, le=16384)] | None = None
    """The fewest frames of a video; a shorter video gives all its frames."""
    max_frames: Annotated[int, Field(ge=1, le=16384)] | None = None
    """The most frames; a longer video is sampled with a lower rate."""
    min_pixels: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Smaller frames are scaled up to this area: of each frame (Qwen2.5-VL), or of all frames together (Qwen3-VL)."""
    max_pixels: Annotated[int, Field(ge=1, le=2**30)] | None = None
    """Larger frames are scaled down to this area, counted in the same way."""
    decoder: Literal["pyav", "decord"] = "pyav"
    """The library that decodes videos, in every recipe of the run. PyAV has a current FFmpeg, decord one of 2018."""

    def sampling(self) -> VideoSampling:
        """Return the same values in the form that recipes take."""
        return VideoSampling(**self.model_dump())


class FilterSection(Section):
    """Which training samples are left out although they could be used. Held-out samples are not filtered."""

    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of a prompt, with its media and the chat template."""
    min_pixels: Annotated[int, Field(ge=1)] | None = None
    """The fewest pixels (width times height) of each image, and of each frame of a video, as the file has them."""
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    """The most pixels, counted in the same way."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels is {self.min_pixels}, above max_pixels ({self.max_pixels}); no medium would fit"
            )
        return self


class FieldsSection(Section):
    """What the fields of a set's samples are called."""

    question: str | None = None
    """The field with the question; by default `data.question_field`, or what the set's layout says."""
    answer: str | None = None
    """The field with the answer; by default `data.answer_field`, or what the set's layout says."""
    media: list[str] = []
    """Columns that hold media although neither their names nor their types show it."""


class TrainSetSection(Section):
    """One of several training sets."""

    name: Annotated[str, Field(pattern=NAME)]
    """The set's name, in metrics and in kept rollouts."""
    path: str
    """The set's files, as `data.train` names them for a single set."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """The share of all prompts that the set gives, in proportion to the weights of the others: exact to within one
    prompt at every moment."""
    fields: FieldsSection = FieldsSection()
    reward: str | None = None
    """The set's own reward function; by default `reward.function`."""


def _one_or_several(value: Any) -> Any:
    return [{"name": TRAIN, "path": value}] if isinstance(value, str) else value


def _as_given(sets: tuple[TrainSetSection, ...]) -> Any:
    """Return a single set that only has a path as that path."""
    if len(sets) == 1 and sets[0] == TrainSetSection(name=TRAIN, path=sets[0].path):
        return sets[0].path
    return [one.model_dump(mode="json") for one in sets]


TrainSets = Annotated[
    tuple[TrainSetSection, ...], BeforeValidator(_one_or_several), PlainSerializer(_as_given), Field(min_length=1)
]


class DataSection(Section):
    train: TrainSets
    """Glob of WebDataset tars, Parquet or JSON, or a Hugging Face `datasets` folder; with `dataplane.uri`, the name
    under which its node registered them. Or a list of several sets, which are mixed by their weights."""
    eval: str | None = None
    """The same for the held-out samples, which are answered greedily; `eval.sets` has more, with names."""
    question_field: str | None = None
    """The field with a sample's question: text, or a list of chat turns. `<image>` and `<video>` in its texts are the
    places of the sample's media; without any, media come before the first turn of the user. By default what the set's
    layout says: docs/own-data.md has the known ones."""
    system_prompt: str = ""
    """The system's turn of samples whose question has none."""
    prompt_template: str = ""
    """A Jinja template for the text of the user's last turn, which it names `{{ question }}`: for example
    `{{ question }} Think first, then answer.` It may also name `{{ fields.NAME }}`. Judges see the question without
    it."""
    chat_template_args: dict[str, bool | int | float | str] = {}
    """Further arguments of the model's chat template, for example `{enable_thinking: false}`."""
    answer_field: str | None = None
    """The field with its answer; `a.b` looks into nested fields. By default what the set's layout says."""
    media_roots: list[str] = []
    """Further folders in which tables and JSON may name media; those beside their files they may name anyway."""
    shuffle_answers: bool = False
    """True gives the answers to other prompts at random: a control run in which nothing can be learnt."""
    on_bad_media: Literal["quarantine", "fail"] = "quarantine"
    """What happens if a medium cannot be decoded: skip the sample and continue, or end the run."""
    filter: FilterSection = FilterSection()
    num_eval_samples: Annotated[int, Field(ge=0)] = 0
    """Held-out samples per evaluation; 0 takes all of them."""
    video: VideoSection = VideoSection()

    @field_validator("train")
    @classmethod
    def _check_names(cls, train: tuple[TrainSetSection, ...]) -> tuple[TrainSetSection, ...]:
        names = [one.name for one in train]
        if len(names) > 1 and TRAIN in names:
            raise ValueError(f"one of several sets is called {TRAIN}; call it what it has")
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two sets are called {min(twice)}; give each a name of its own")
        return train
