"""Tests that the groups of a begun step come back from their file with the bytes of their records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from dataplane.core.refs import Ref
from tests.yatt_mm.generation.fakes import group, prompt
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import CheckpointError, DiskError
from yatt_mm.keeper.group_files import GroupFiles
from yatt_mm.protocol.control import Slot
from yatt_mm.protocol.faults import Failures, Fault
from yatt_mm.protocol.rewards import Scores
from yatt_mm.protocol.rollout import PromptTask
from yatt_mm.protocol.saved_groups import SavedGroup, SavedShare, together
from yatt_mm.protocol.step_meter import StepMeter

NUM_GROUPS = 70
"""More than are read together."""


def files_of(client: Client, reader: Reader) -> GroupFiles:
    return GroupFiles(client, reader, scope="run", durable=False)


def saved(position: int, ref: Ref, reason: str = "stop") -> SavedGroup:
    task = PromptTask(slot=position, conversation=ask("?"), media=(), num_samples=2, seed=0, name=f"group/{position}")
    judged = Scores(source="reward.judges.head", values=(0.25, 0.1), words=("no", "\ud83d"))
    scores = Scores(
        source="reward.function",
        values=(0.1, 1 / 3),
        parts={"accuracy": (0.0, None)},
        answers=(None, "7"),
        votes=("a", "7"),
    )
    return SavedGroup(
        slot=prompt(Slot(position=position, epoch=1, index=position + 9, set_name="charts")).slot,
        group=replace(group(task, reason), ref=ref),
        num_parts=2,
        rewards=(0.35, 1 / 3 + 0.1),
        scores=(scores, judged),
        failures=(Failures(source="reward.function", num=1, fault=Fault(what="ValueError: x", where="f.py:3")),),
    )


def record(position: int) -> bytes:
    return bytes([position]) * (position + 1)


def test_groups_come_back_on_another_node_as_they_were(tmp_path: Path) -> None:
    path, meter = tmp_path / "groups-0.arrow", StepMeter(sums={"a": 0.1}, counts={"a": 3.0}, maxima={"b": 1e-9})
    with EmbeddedNode(memory_bytes=16 << 20, roots={}) as node, Client(node.uri) as client, Reader(node.uri) as reader:
        refs = [client.put(record(at), name=f"group/{at}") for at in range(NUM_GROUPS)]
        groups = tuple(saved(at, ref, "abort" if at == 3 else "stop") for at, ref in enumerate(refs))
        files_of(client, reader).write(path, SavedShare(groups=groups, has_wrong_rewards=True, meter=meter))
    assert path.with_name(f"{path.name}.written").exists(), "it is on the disk, and the manifest has its digest"
    with EmbeddedNode(memory_bytes=16 << 20, roots={}) as node, Client(node.uri) as client, Reader(node.uri) as reader:
        client.open_scope("run")
        share = files_of(client, reader).put_back(path, "again")
        assert (share.has_wrong_rewards, share.meter) == (True, meter)
        assert [one.group.ref.name for one in share.groups] == [f"again/{at}" for at in range(NUM_GROUPS)]
        views = reader.resolve([one.group.ref for one in share.groups])
        assert [view.tobytes() for view in views] == [record(at) for at in range(NUM_GROUPS)]
        del views
        client.close_scope("run")
        assert client.stat()["num_objects"] == 0, "they end with the run"
    bare = [replace(one, group=replace(one.group, ref=refs[0])) for one in share.groups]
    assert bare == [replace(one, group=replace(one.group, ref=refs[0])) for one in groups]


def test_a_file_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    with EmbeddedNode(memory_bytes=16 << 20, roots={}) as node, Client(node.uri) as client, Reader(node.uri) as reader:
        files = files_of(client, reader)
        with pytest.raises(DiskError, match=f"cannot write {tmp_path / 'missing' / 'groups-0.arrow'}"):
            files.write(tmp_path / "missing" / "groups-0.arrow", SavedShare(groups=(), meter=StepMeter()))
        (tmp_path / "groups-0.arrow").write_bytes(b"no Arrow file")
        with pytest.raises(CheckpointError, match=r"groups-0.arrow cannot be read"):
            files.put_back(tmp_path / "groups-0.arrow", "again")


def test_the_shares_of_several_controllers_add_up() -> None:
    ref = Ref(name="r", kind="plain", dtype="uint8", shape=(1,), nbytes=1, node="n", lineage=None)
    one = SavedShare(groups=(saved(1, ref),), meter=StepMeter(sums={"a": 1.0}, maxima={"t": 3.0}))
    other = SavedShare(groups=(saved(0, ref),), has_wrong_rewards=True, meter=StepMeter(sums={"a": 2.0}))
    both = together([one, other])
    assert [group.slot.position for group in both.groups] == [1, 0] and both.has_wrong_rewards
    assert both.meter == StepMeter(sums={"a": 3.0}, maxima={"t": 3.0})
    assert together([]) == SavedShare(groups=(), meter=StepMeter())
