"""Tests of the keeper on a real node: what its files say is what the groups hold."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.errors import NodeTimeoutError
from dataplane.core.refs import Ref
from tests.dataplane.clips import encode_video, moving
from tests.dataplane.shards import RECIPE, encode, noise
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import DiskError
from yatt_mm.keeper.keeper import Keeper
from yatt_mm.keeper.table import read_rows, table_path
from yatt_mm.protocol import group_record
from yatt_mm.protocol.control import Prompt, ScoredGroup, Slot
from yatt_mm.protocol.kept import KeptGroup
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.rollout import GroupRef

FRAMES = {"kernel": "frames", "version": 1, "sampling": {"by": "count", "rule": "qwen3_vl", "num_frames": 2}}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with EmbeddedNode(memory_bytes=16 << 20, roots={}) as node, Client(node.uri, timeout_s=30) as opened:
        yield opened


def keeper_of(client: Client, run_dir: Path, *, num_controllers: int) -> Keeper:
    own = Client(client.uri, timeout_s=30), Reader(client.uri, timeout_s=30)
    return Keeper(*own, run_dir=run_dir, num_controllers=num_controllers)


def image(client: Client, seed: int) -> Ref:
    (made,) = client.derive([client.put_source(encode(noise(seed)), meta={"medium": "image"})], RECIPE)
    assert isinstance(made, Ref)
    return made


def kept(
    client: Client,
    position: int,
    *media: Ref,
    texts: tuple[str, ...] = ("a", "b"),
    words: tuple[str, str] | None = None,
) -> KeptGroup:
    """Return a group that is kept, with its record in the node."""
    samples = tuple(
        group_record.SampleRecord(
            token_ids=np.arange(position, position + place),
            logprobs=-np.arange(1, place + 1, dtype=np.float32),
            policy_versions=np.arange(3, 3 + place),
            text=text,
            finish_reason="stop" if place else "length",
        )
        for place, text in enumerate(texts)
    )
    record = group_record.encode(group_record.GroupRecord(prompt_token_ids=np.arange(3), samples=samples))
    group: Any = GroupRef(
        slot=position,
        ref=client.put(record, name=uuid.uuid4().hex),
        media=media,
        num_prompt_tokens=3,
        lengths=(0, 1),
        policy_versions=((0, 0), (0, 0)),
        finish_reasons=("length", "stop"),
    )
    scores = (
        Scores(
            source="reward.function",
            values=(0.0, 1.0),
            parts={"accuracy": (0.0, 1.0), "format": (None, 0.5)},
            answers=(None, "\ud83d4"),
        ),
    )
    if words:
        scores = (*scores, Scores(source="reward.judges.head", values=(0.5, 0.25), words=words))
    prompt = Prompt(
        slot=Slot(position=position, epoch=2, index=position + 50),
        conversation=ask(f"Think. what is {position}?"),
        question=ask(f"what is {position}?"),
        answer=str(position),
        fields={},
        reward="m:f",
        media=media,
    )
    scored = ScoredGroup(prompt=prompt, group=group, rewards=(0.0, 1.25), scores=scores)
    return KeptGroup(scored=scored, advantages=(-1.0, 1.0) if position < 10 else None)


def test_a_file_holds_the_groups_of_all_controllers_in_order_as_they_are(client: Client, tmp_path: Path) -> None:
    keeper = keeper_of(client, tmp_path, num_controllers=2)
    path = table_path(tmp_path, 4)
    same = image(client, 0)
    keeper.keep(4, "train", [kept(client, 12, same)], is_last=False)
    keeper.keep(4, "train", [kept(client, 3, same, image(client, 1))], is_last=True)
    assert not path.exists(), "the other controller's share is missing"
    keeper.keep(4, "train", [kept(client, 1, words=("no", "yes"))], is_last=True)
    rows = read_rows(path)
    assert [(row["position"], row["place"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1), (12, 0), (12, 1)]
    empty, full = rows[2:4]
    assert {"step": 4, "split": "train", "epoch": 2, "index": 53, "question": "what is 3?", "answer": "3"}.items() <= (
        full.items()
    )
    asked = [{"role": "user", "content": [{"type": "text", "text": "Think. what is 3?"}]}]
    assert json.loads(full["conversation"]) == asked, "what the policy read, with what the config adds"
    assert (full["response"], full["reward"], full["advantage"], full["num_tokens"]) == ("b", 1.25, 1.0, 1)
    assert (full["token_ids"], full["finish_reason"], full["logprob_mean"]) == ([3], "stop", -1.0)
    assert (full["policy_version_min"], full["policy_version_max"]) == (3, 3)
    assert full["parts"] == [{"name": "accuracy", "value": 1.0}, {"name": "format", "value": 0.5}]
    assert (full["set"], full["read_answer"], empty["read_answer"]) == ("train", "?4", None)
    assert empty["parts"] == [{"name": "accuracy", "value": 0.0}]
    assert (empty["token_ids"], empty["logprob_min"], empty["finish_reason"]) == ([], None, "length")
    assert rows[4]["advantage"] is None
    assert [scored["words"] for row in rows[:2] for scored in row["scores"]] == [None, "no", None, "yes"]
    first, second = full["media"]
    assert rows[4]["media"] == [first] and first["source"] != second["source"]
    for seed, medium in enumerate((first, second)):
        seen = np.asarray(Image.open(io.BytesIO(medium["thumbnail"]))).astype(int)
        differences = [np.abs(seen - noise(other)).mean() for other in range(4)]
        assert int(np.argmin(differences)) == seed and len(medium["thumbnail"]) <= 8192


def test_an_evaluation_is_added_to_the_file_of_its_step_and_an_earlier_file_is_replaced(
    client: Client, tmp_path: Path
) -> None:
    for _ in range(2):  # a run, and one that goes on from an earlier step
        keeper = keeper_of(client, tmp_path, num_controllers=1)
        keeper.keep(0, "eval", [kept(client, 0)], is_last=True)
        keeper.keep(1, "train", [kept(client, 1)], is_last=True)
        keeper.keep(1, "eval", [kept(client, 0)], is_last=True)
        keeper.keep(2, "train", [kept(client, 2)], is_last=True)
        splits = [[row["split"] for row in read_rows(table_path(tmp_path, step))] for step in range(3)]
        assert splits == [["eval"] * 2, ["train", "train", "eval", "eval"], ["train"] * 2]


def test_shares_of_different_steps_do_not_mix(client: Client, tmp_path: Path) -> None:
    keeper = keeper_of(client, tmp_path, num_controllers=2)
    keeper.keep(1, "train", [kept(client, 0)], is_last=True)
    keeper.keep(1, "eval", [kept(client, 5)], is_last=True)
    keeper.keep(1, "train", [], is_last=True)
    assert [row["split"] for row in read_rows(table_path(tmp_path, 1))] == ["train"] * 2
    keeper.keep(1, "eval", [], is_last=True)
    assert [row["split"] for row in read_rows(table_path(tmp_path, 1))] == ["train"] * 2 + ["eval"] * 2


def test_after_a_fault_what_was_sent_in_part_comes_again_and_what_is_written_stays(
    client: Client, tmp_path: Path
) -> None:
    keeper = keeper_of(client, tmp_path, num_controllers=2)
    for groups in ([kept(client, 0), kept(client, 1)], [kept(client, 2)]):
        keeper.keep(1, "train", groups, is_last=True)
    keeper.keep(1, "eval", [kept(client, 5)], is_last=True)
    for groups in ([kept(client, 0)], [kept(client, 2)]):  # without those that were not trained on
        keeper.keep(1, "train", groups, is_last=True, restart_count=1)
    keeper.keep(1, "eval", [kept(client, 5)], is_last=True, restart_count=1)
    keeper.keep(1, "eval", [kept(client, 6)], is_last=True, restart_count=0)
    assert [row["position"] for row in read_rows(table_path(tmp_path, 1))] == [0, 0, 1, 1, 2, 2]
    keeper.keep(1, "eval", [kept(client, 7)], is_last=True, restart_count=1)
    evaluated = [row["position"] for row in read_rows(table_path(tmp_path, 1)) if row["split"] == "eval"]
    assert evaluated == [5, 5, 7, 7]


@pytest.mark.parametrize("decoder", ["pyav", "decord"])
def test_a_video_has_a_strip_of_frames_by_the_decoder_of_its_patches(
    client: Client, tmp_path: Path, decoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, derive = [], Client.derive
    monkeypatch.setattr(
        Client, "derive", lambda self, refs, recipe: asked.append(recipe.get("decoder")) or derive(self, refs, recipe)
    )
    source = client.put_source(encode_video(tmp_path / "v.mp4", "mp4v", moving(8, 40, 60)), meta={"medium": "video"})
    (frames,) = client.derive([source], FRAMES | {"decoder": decoder})
    assert isinstance(frames, Ref)
    keeper_of(client, tmp_path, num_controllers=1).keep(1, "eval", [kept(client, 0, frames)], is_last=True)
    assert asked == [decoder, decoder]
    (medium,) = read_rows(table_path(tmp_path, 1))[0]["media"]
    assert medium["kind"] == "video" and Image.open(io.BytesIO(medium["thumbnail"])).size == (4 * 60, 40)


def test_records_may_be_released_when_a_share_was_taken(client: Client, tmp_path: Path) -> None:
    keeper = keeper_of(client, tmp_path, num_controllers=2)
    group = kept(client, 0)
    keeper.keep(1, "train", [group], is_last=True)
    client.release([group.scored.group.ref])
    keeper.keep(1, "train", [], is_last=True)
    assert len(read_rows(table_path(tmp_path, 1))) == 2


def test_half_a_character_is_replaced_and_ends_nothing(client: Client, tmp_path: Path) -> None:
    group = kept(client, 0, words=("\ud83d", "fine \ude00"))
    broken = replace(group.scored, prompt=replace(group.scored.prompt, answer="a \ud83d", question=ask("\udcff?")))
    keeper = keeper_of(client, tmp_path, num_controllers=1)
    keeper.keep(1, "train", [replace(group, scored=broken)], is_last=True)
    row = read_rows(table_path(tmp_path, 1))[1]
    assert (row["answer"], row["question"], row["scores"][1]["words"]) == ("a ?", "??", "fine ?")


def test_a_node_that_can_make_no_picture_now_costs_the_pictures_alone(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object) -> None:
        raise NodeTimeoutError("the node is busy")

    keeper = keeper_of(client, tmp_path, num_controllers=1)
    monkeypatch.setattr(keeper._client, "derive", late)
    keeper.keep(1, "train", [kept(client, 0, image(client, 0))], is_last=True)
    (medium,) = read_rows(table_path(tmp_path, 1))[0]["media"]
    assert medium["thumbnail"] is None and medium["kind"] == "image"


def test_a_disk_without_room_is_an_error_that_names_the_file(client: Client, tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.partial").symlink_to("/dev/full")
    with pytest.raises(DiskError, match=r"cannot write .*rollouts/step_1.parquet: .*make room on its disk; "):
        keeper_of(client, tmp_path, num_controllers=1).keep(1, "train", [kept(client, 0)], is_last=True)
