"""Tests of the forms of reward functions: one response or a batch, async, verl's, and those that look at the media.
test_parts.py has the parts with names."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from models.recipes.media_recipes import VideoSampling, load_recipes
from tests.dataplane.clips import encode_video
from tests.dataplane.shards import RECIPE, encode, write_tar
from yatt_mm.common.conversation import ask
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import Fault
from yatt_mm.protocol.rewards import RewardTask
from yatt_mm.protocol.rollout import GroupRef
from yatt_mm.rewards.call import RewardCall
from yatt_mm.rewards.form import form_of
from yatt_mm.rewards.medium import Medium
from yatt_mm.rewards.reading import Reward
from yatt_mm.rewards.response import Response
from yatt_mm.rewards.worker import RewardWorker

TEXTS = ("a", "bb", "ccc")


def responses(*texts: str) -> list[Response]:
    turns = ask("What?").messages()
    return [
        Response(
            text=text,
            answer="bb",
            fields={"data_source": "set", "extra_info": {"index": 3}},
            conversation=turns,
            group=texts,
            num_tokens=len(text),
            max_tokens=9,
        )
        for text in texts
    ]


def call(function: Callable[..., Any], *texts: str, **settings: Any) -> list[Reward | Fault]:
    return RewardCall(function, name="mine", **{"deadline_s": 5.0, **settings})(responses(*texts))


def values(given: list[Reward | Fault]) -> list[float]:
    return [one.value for one in given if isinstance(one, Reward)]


def test_one_response_at_a_time_with_what_the_function_asks_for_by_name() -> None:
    def score(
        said: str, right: str, more: dict[str, Any], group: list[str], *, num_tokens: int, max_tokens: int
    ) -> Any:
        return group.index(said) + 10 * num_tokens + 100 * max_tokens + 1000 * (said == right)

    assert values(call(score, *TEXTS)) == [910, 1921, 932]

    def of_turns(response: str, answer: str, fields: dict[str, Any], conversation: list[dict[str, Any]]) -> Any:
        return conversation == [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]

    assert values(call(of_turns, "a")) == [1.0]


def test_a_batch_is_one_call_for_all_responses() -> None:
    calls = []

    def score(responses: list[str], answers: list[str], fields: list[dict[str, Any]], groups: list[list[str]]) -> Any:
        calls.append((responses, answers, [field["data_source"] for field in fields], groups))
        return [len(response) for response in responses]

    assert values(call(score, *TEXTS)) == [1, 2, 3]
    assert calls == [(list(TEXTS), ["bb"] * 3, ["set"] * 3, [list(TEXTS)] * 3)]
    assert call(score) == []


def test_an_async_function_scores_all_responses_at_the_same_time() -> None:
    async def score(response: str, answer: str, fields: dict[str, Any]) -> float:
        await asyncio.sleep(0.3)
        return float(response == answer)

    started = time.monotonic()
    assert values(call(score, *TEXTS * 10)) == [0.0, 1.0, 0.0] * 10
    assert time.monotonic() - started < 3, "one after another they take 9 s"

    async def batch(responses: list[str], answers: list[str], fields: list[dict[str, Any]]) -> list[float]:
        await asyncio.sleep(0)
        return [float(response == answer) for response, answer in zip(responses, answers)]

    assert values(call(batch, *TEXTS)) == [0.0, 1.0, 0.0]


def test_each_async_response_that_fails_is_told_and_the_others_count() -> None:
    async def score(response: str, answer: str, fields: dict[str, Any]) -> float:
        if response == "late":
            await asyncio.sleep(60)
        if response == "own":
            raise TimeoutError("the server is slow")
        return 1 / len(response)

    fine, late, own, empty = call(score, "ab", "late", "own", "", deadline_s=0.3)
    assert fine == Reward(value=0.5)
    assert isinstance(late, Fault) and late.what == "it took longer than 0.3 s (reward.deadline_s)"
    assert isinstance(own, Fault) and own.what == "TimeoutError: the server is slow"
    assert isinstance(empty, Fault) and empty.what.startswith("ZeroDivisionError") and __file__ in empty.where
    assert "asyncio" not in empty.trace


def test_an_async_function_that_never_gives_way_is_interrupted() -> None:
    async def score(response: str, answer: str, fields: dict[str, Any]) -> float:
        while True:
            time.sleep(0.01)

    (given,) = call(score, "a", deadline_s=0.2)
    assert isinstance(given, Fault) and given.what == "it took longer than 0.2 s (reward.deadline_s)"


def test_one_event_loop_serves_all_calls() -> None:
    loops = []

    async def score(response: str, answer: str, fields: dict[str, Any]) -> float:
        loops.append(asyncio.get_running_loop())
        return 1.0

    scored = RewardCall(score, name="mine", deadline_s=5)
    scored(responses("a"))
    scored(responses("b"))
    assert loops[0] is loops[1]


def test_a_library_cannot_take_the_interruption_for_an_error_of_its_own() -> None:
    def score(response: str, answer: str, fields: dict[str, Any]) -> float:
        while True:
            with contextlib.suppress(Exception):  # as libraries do
                time.sleep(0.05)

    (given,) = call(score, "a", deadline_s=0.2)
    assert isinstance(given, Fault) and given.what == "it took longer than 0.2 s (reward.deadline_s)"


def test_a_batch_takes_no_longer_than_a_call_may() -> None:
    def score(responses: list[str], answers: list[str], fields: Any) -> list[float]:
        time.sleep(60)
        return []

    given = call(score, *TEXTS, deadline_s=0.1, longest_s=0.2)
    assert [one.what for one in given if isinstance(one, Fault)] == [
        "it took longer than 0.2 s (reward.deadline_s)"
    ] * 3


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ([1.0], "it returned a list of 1 for 3 responses; wanted a list with one reward for each"),
        (1.0, "it returned a float for 3 responses; wanted a list with one reward for each"),
        ([1.0, None, {"accuracy": "high"}], None),
    ],
)
def test_a_batch_of_another_length_gives_no_reward(returned: Any, what: str | None) -> None:
    given = call(lambda responses, answers, fields: returned, *TEXTS)
    if what is not None:
        assert [one.what for one in given if isinstance(one, Fault)] == [what] * 3
    else:
        assert given[0] == Reward(value=1.0)
        assert [one.response for one in given if isinstance(one, Fault)] == ["bb", "ccc"], "the others count"


def test_a_function_of_verl_is_called_by_its_own_names() -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> Any:
        return {"score": float(solution_str == ground_truth), "acc": extra_info["index"], "set": len(data_source)}

    assert call(compute_score, "a", "bb") == [
        Reward(value=0.0, parts={"acc": 3.0, "set": 3.0}),
        Reward(value=1.0, parts={"acc": 3.0, "set": 3.0}),
    ]

    def batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, **more: Any) -> Any:
        return [len(solution) for solution in solution_strs]

    assert values(call(batch, *TEXTS)) == [1, 2, 3]


def test_the_form_is_read_from_the_parameters() -> None:
    async def plain(a: str, b: str, c: Any, media: Any, threshold: float = 0.5, **more: Any) -> float:
        return 0.0

    form = form_of(plain)
    assert (form.first, form.named) == (("response", "answer", "fields"), (("media", "media"),))
    assert (form.is_batch, form.is_async) == (False, True)
    with pytest.raises(ValueError, match=r"it takes \(response, answer\); wanted \(response, answer, fields\)"):
        form_of(lambda response, answer: 0.0)


COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
NUM_FRAMES = 4


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNode]:
    """A node with an image of each colour, and a video whose frames become brighter."""
    folder = tmp_path_factory.mktemp("colours")
    members = {f"{name}.png": encode(Image.new("RGB", (56, 84), colour)) for name, colour in COLOURS.items()}
    frames = np.stack([np.full((56, 56, 3), 60 * number, np.uint8) for number in range(NUM_FRAMES)])
    members["video.mp4"] = encode_video(folder / "clip.mp4", "mp4v", frames, fps=4.0)
    write_tar(folder / "a.tar", members)
    with EmbeddedNode(memory_bytes=32 << 20, roots={"d": [str(folder / "a.tar")]}) as node:
        yield node


def patches(client: Client, number: int, recipe: dict[str, Any]) -> Ref:
    """Return the patches of the medium of a sample, as a prompt has them."""
    (made,) = client.derive([client.samples("d", [number])[0].media[0]], recipe)
    assert isinstance(made, Ref)
    return made


def dominant(
    responses: list[str], answers: list[str], fields: list[Any], media: list[list[Any]]
) -> list[dict[str, Any]]:
    """Score each response by the colour of its own image."""
    seen = [pictures[0].image() for pictures in media]
    names = [max(COLOURS, key=lambda name: float(np.dot(COLOURS[name], np.array(one).mean((0, 1))))) for one in seen]
    assert {one.size for one in seen} == {(56, 84)}
    return [{"accuracy": response == name, "answer": response} for response, name in zip(responses, names)]


def test_a_batch_function_sees_the_image_of_each_response_and_its_part_is_bounded_and_weighted(
    node: EmbeddedNode,
) -> None:
    path = f"{__name__}:dominant"
    worker = RewardWorker(
        functions=(path,),
        weights={"accuracy": 0.5},
        ranges={"accuracy": (0.0, 0.75)},
        dataplane_uri=node.uri,
        timeout_s=30,
        deadline_s=5,
        longest_s=9,
    )
    tasks = []
    with Client(node.uri) as client:
        client.ingest("d")
        for number, name in enumerate(("blue", "green", "red")):  # a tar's samples are in the order of their members
            index = list(COLOURS).index(name)
            record = group_record.GroupRecord(
                prompt_token_ids=np.zeros(1, np.int64),
                samples=tuple(
                    group_record.SampleRecord(
                        token_ids=np.zeros(1, np.int64),
                        logprobs=np.zeros(1, np.float32),
                        policy_versions=np.zeros(1, np.int64),
                        text=text,
                        finish_reason="stop",
                    )
                    for text in COLOURS
                ),
            )
            data = np.frombuffer(group_record.encode(record), np.uint8)
            group = GroupRef(
                slot=number,
                ref=client.put(data, name=f"group-{number}"),
                media=(),
                num_prompt_tokens=1,
                lengths=(1,) * 3,
                policy_versions=((0, 0),) * 3,
                finish_reasons=("stop",) * 3,
            )
            tasks.append(
                RewardTask(
                    group=group,
                    function=path,
                    answer=name,
                    fields={},
                    conversation=ask("Which colour?", ["image"]),
                    media=(patches(client, index, dict(RECIPE)),),
                    max_tokens=3,
                )
            )
        given = worker.score(tasks)
    for rewards, name in zip(given, ("blue", "green", "red")):
        accuracy = tuple(float(colour == name) for colour in COLOURS)
        assert rewards.rewards == tuple(0.5 * 0.75 * right for right in accuracy)
        assert rewards.parts == {"accuracy": accuracy}, "as it was, before its range and its weight"
        assert rewards.answers == tuple(COLOURS)


def test_the_frames_of_a_video_are_those_that_the_model_sees(node: EmbeddedNode, tiny_dir: Path) -> None:
    recipes = load_recipes(tiny_dir, VideoSampling(fps=2.0, min_frames=2))
    with Client(node.uri) as client, Reader(node.uri) as reader:
        client.ingest("d")
        number = len(COLOURS)
        ref = patches(client, number, dict(recipes.of("video")))
        medium = Medium(ref, client, reader)
        frames = medium.frames()
        assert (medium.kind, len(frames)) == ("video", len(ref.meta["frame_indices"]))
        brightness = [float(np.array(frame).mean()) for frame in frames]
        wanted = [60 * index for index in ref.meta["frame_indices"]]
        assert brightness == pytest.approx(wanted, abs=6)
        with pytest.raises(ValueError, match="is a video; call frames"):
            medium.image()
        image = Medium(patches(client, 0, dict(RECIPE)), client, reader)
        assert np.array(image.frames()[0]).mean((0, 1)).tolist() == [255, 0, 0]
        buffer = io.BytesIO()
        image.image().save(buffer, "PNG")  # it is a plain picture of Pillow
