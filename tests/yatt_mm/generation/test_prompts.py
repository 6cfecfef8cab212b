"""Tests that samples become prompts, on a real node whose shards have faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from models.recipes.media_recipes import load_recipes
from tests.dataplane.shards import encode, noise, wait_until
from tests.dataplane.tables import verl_table, write_parquet
from tests.yatt_mm import runs
from yatt_mm.common.conversation import ask
from yatt_mm.common.errors import DataError
from yatt_mm.config.run_config import load_config
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.preflight.run_sets import find_held_out_sets, find_train_sets
from yatt_mm.protocol.control import Prompt, RunStart, Slot

CORRUPT = 2
NUM_TRAIN = 6


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNode]:
    folder = tmp_path_factory.mktemp("prompts")
    runs.write_shard(folder / "train.tar", range(NUM_TRAIN), corrupt=(CORRUPT,))
    runs.write_shard(folder / "eval.tar", range(10, 13), corrupt=(11,))
    roots = {name: [str(folder / f"{name}.tar")] for name in ("train", "eval")}
    verl = verl_table([[encode(noise(at))] for at in range(3)] + [[]])
    write_parquet(folder / "verl.parquet", verl)
    roots["verl"] = [str(folder / "verl.parquet")]
    with EmbeddedNode(memory_bytes=16 * 2**20, roots=roots) as node:
        yield node


def source(
    node: EmbeddedNode,
    model: Path,
    *overrides: str,
    told: Sequence[tuple[str, str, str, str]] = (),
    train: str = "train",
) -> PromptSource:
    config, *rest = runs.arguments(Path("unused"), model, "prompts", "train.steps=1")
    sets = (f"dataplane.uri={node.uri}", f"data.train={train}", "data.eval=eval")
    client, loaded = Client(node.uri), load_config(runs.ROOT / config, [*rest, *sets, *overrides])
    start = RunStart(
        step=0,
        checkpoint=None,
        told=frozenset(told),
        train_sets=tuple(found.run_set for found in find_train_sets(client, loaded)),
        eval_sets=tuple(found.run_set for found in find_held_out_sets(client, loaded)),
    )
    return PromptSource(client, loaded, load_recipes(model), start, controller=0)


def held_out(source: PromptSource) -> tuple[list[Prompt], list[dict[str, Any]]]:
    """Return what the source loads of the only held-out set."""
    return source.load_eval(source._start.eval_sets[0])


def slots(*indices: int) -> list[Slot]:
    return [Slot(position=place, epoch=0, index=index) for place, index in enumerate(indices)]


def test_prompts_carry_patches_by_reference_and_bad_media_become_notices(node: EmbeddedNode, tiny_dir: Path) -> None:
    prompts, notices = source(node, tiny_dir).load(slots(0, CORRUPT, 4))
    assert [prompt.slot.index for prompt in prompts] == [0, 4]
    assert all(ref.kind == "derived" and ref.shape == (16, 1176) for prompt in prompts for ref in prompt.media)
    (notice,) = notices
    assert (notice["index"], notice["key"], notice["shard"]) == (CORRUPT, f"{CORRUPT:06d}", "train.tar")
    assert "truncated" in notice["reason"]


def test_prefetched_prompts_are_made_before_they_are_loaded(node: EmbeddedNode, tiny_dir: Path) -> None:
    ahead = source(node, tiny_dir)
    with Client(node.uri) as client:
        before = client.stat()["num_processed"]
        ahead.prefetch(slots(1, CORRUPT, 3))
        wait_until(lambda: client.stat()["num_processed"] == before + 2)
        assert len(ahead.load(slots(1, 3))[0]) == 2
        assert client.stat()["num_processed"] == before + 2


def test_a_batch_of_prompts_is_one_round_trip(node: EmbeddedNode, tiny_dir: Path) -> None:
    prompts = source(node, tiny_dir)
    with Client(node.uri) as client:
        before = {verb: counts["num_calls"] for verb, counts in client.stat()["verbs"].items()}
        prompts.load(slots(*range(NUM_TRAIN)))
        after = {verb: counts["num_calls"] for verb, counts in client.stat()["verbs"].items()}
    made = {verb: count - before.get(verb, 0) for verb, count in after.items() if count > before.get(verb, 0)}
    assert made == {"prepare": 1, "stat": 1}


def test_bad_media_raise_when_the_config_says_so(node: EmbeddedNode, tiny_dir: Path) -> None:
    with pytest.raises(DataError, match=r"bad sample 000002 in train\.tar: truncated .*on_bad_media=quarantine"):
        source(node, tiny_dir, "data.on_bad_media=fail").load(slots(CORRUPT))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("data.filter.max_pixels=3136", "data.filter.min_pixels=3136"), None),
        (("data.filter.max_pixels=3135",), "it has images of 56x56 = 3136 pixels; data.filter.max_pixels is 3135"),
        (("data.filter.min_pixels=3137",), "it has images of 56x56 = 3136 pixels; data.filter.min_pixels is 3137"),
        (("data.filter.max_prompt_tokens=19",), "its prompt has 20 tokens; data.filter.max_prompt_tokens is 19"),
    ],
)
def test_a_filter_leaves_out_training_samples_alone_and_ends_no_run(
    node: EmbeddedNode, tiny_dir: Path, overrides: tuple[str, ...], reason: str | None
) -> None:
    strict = source(node, tiny_dir, "data.on_bad_media=fail", *overrides)
    prompts, notices = strict.load(slots(0, 4))
    assert len(prompts) == (2 if reason is None else 0)
    assert [notice["reason"] for notice in notices] == ([] if reason is None else [reason] * 2)
    assert all(notice["is_filtered"] for notice in notices)
    assert len(held_out(source(node, tiny_dir, *overrides))[0]) == 2


def test_shuffled_answers_come_from_other_samples_in_the_fields_as_well(node: EmbeddedNode, tiny_dir: Path) -> None:
    own, _ = source(node, tiny_dir).load(slots(*range(NUM_TRAIN)))
    shuffled, _ = source(node, tiny_dir, "data.shuffle_answers=true").load(slots(*range(NUM_TRAIN)))
    assert [prompt.answer for prompt in own] != [prompt.answer for prompt in shuffled]
    assert all(prompt.fields["answer"] == prompt.answer for prompt in shuffled)
    again, _ = source(node, tiny_dir, "data.shuffle_answers=true").load(slots(*range(NUM_TRAIN)))
    assert again == shuffled


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("rollout.max_model_len=7", "rollout.max_tokens=3"), "its media make 4 tokens"),
        (("rollout.max_model_len=256",), None),
    ],
)
def test_what_cannot_fit_is_set_aside_before_it_reaches_an_engine(
    node: EmbeddedNode, tiny_dir: Path, overrides: tuple[str, ...], reason: str | None
) -> None:
    prompts, notices = source(node, tiny_dir, *overrides).load(slots(0))
    assert (reason is None and len(prompts) == 1) or (reason is not None and reason in notices[0]["reason"])


def test_held_out_notices_are_told_once_and_not_again_after_a_resume(node: EmbeddedNode, tiny_dir: Path) -> None:
    fresh = source(node, tiny_dir, "controllers.num=1")
    prompts, notices = held_out(fresh)
    assert (len(prompts), len(notices)) == (2, 1)
    assert held_out(fresh) == (prompts, [])
    (bad,) = notices
    shard, key, reason = bad["shard"], bad["key"], bad["reason"]
    same = ("eval", shard, key, reason)
    for told, num in ((same, 0), *(((*same[:at], "another", *same[at + 1 :]), 1) for at in range(4))):
        assert len(held_out(source(node, tiny_dir, "controllers.num=1", told=(told,)))[1]) == num


VERL = ("data.question_field=prompt", "data.answer_field=reward_model.ground_truth")


@pytest.mark.parametrize("named", [(), VERL[:1], VERL])
def test_verls_parquet_becomes_prompts(node: EmbeddedNode, tiny_dir: Path, named: tuple[str, ...]) -> None:
    prompts, notices = source(node, tiny_dir, *named, train="verl").load(slots(1, 2, 3))
    assert [(prompt.question.text, prompt.answer, len(prompt.media)) for prompt in prompts] == [
        ("What is in picture 1?", "1", 1),
        ("What is in picture 2?", "2", 1),
    ]
    assert prompts[0].fields["reward_model"] == {"ground_truth": "1", "style": "rule"}
    assert "placeholders for image; the sample's media are none" in notices[0]["reason"]


def test_shuffled_answers_replace_nested_ones_too(node: EmbeddedNode, tiny_dir: Path) -> None:
    plain, _ = source(node, tiny_dir, *VERL, train="verl").load(slots(0, 1, 2))
    prompts, _ = source(node, tiny_dir, *VERL, "data.shuffle_answers=true", train="verl").load(slots(0, 1, 2))
    own = {prompt.slot.index: prompt.answer for prompt in plain}
    assert any(prompt.answer != own[prompt.slot.index] for prompt in prompts)
    assert all(prompt.fields["reward_model"]["ground_truth"] == prompt.answer for prompt in prompts)


def test_a_field_that_is_not_there_is_named_beside_those_that_are(node: EmbeddedNode, tiny_dir: Path) -> None:
    _, notices = source(node, tiny_dir, "data.answer_field=answer", train="verl").load(slots(0))
    assert "the sample lacks answer; it has ['data_source', 'extra_info', 'prompt'" in notices[0]["reason"]


def test_the_config_puts_a_system_turn_and_a_template_around_the_question(node: EmbeddedNode, tiny_dir: Path) -> None:
    around = (
        "data.system_prompt='Be brief.'",
        "data.prompt_template='Look. {{ question }} ({{ fields.data_source }})'",
    )
    prompts, _ = source(node, tiny_dir, *VERL, *around, train="verl").load(slots(1))
    assert prompts[0].conversation.messages() == [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look. "},
                {"type": "image"},
                {"type": "text", "text": "What is in picture 1? (geometry)"},
            ],
        },
    ]
    assert prompts[0].question == ask("What is in picture 1?", ["image"])
