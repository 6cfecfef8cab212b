"""Tests that sets in the layouts of other projects become prompts with nothing set but their path, alone and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.core.digests import content_digest
from models.recipes.media_recipes import load_recipes
from tests.dataplane.tables import write_lines
from tests.yatt_mm import runs
from tests.yatt_mm.preflight import published
from yatt_mm.batching.prompt_order import PromptOrder
from yatt_mm.common.conversation import Conversation
from yatt_mm.common.errors import ConfigError
from yatt_mm.common.sample_layouts import EXACT_MATCH, MATHEMATICS
from yatt_mm.config.run_config import Config, load_config
from yatt_mm.generation.prompts import PromptSource
from yatt_mm.preflight.first_samples import check_first_samples
from yatt_mm.preflight.run_checks import check_run
from yatt_mm.preflight.run_sets import find_held_out_sets, find_train_sets, pattern_of, sources_of
from yatt_mm.protocol.control import RunStart, Slot

WANTED = {
    "verl": ("verl", MATHEMATICS, ["user: <image>What is in picture {}?"]),
    "easyr1": ("EasyR1", MATHEMATICS, ["user: <image>What is in picture {}?"]),
    "llava": ("LLaVA or ShareGPT", EXACT_MATCH, ["user: <image>\nWhat is in picture {}?"]),
    "sharegpt": (
        "LLaVA or ShareGPT",
        EXACT_MATCH,
        ["system: Be brief.", "user: Hello", "assistant: Hi", "user: <image>What is in picture {}?"],
    ),
    "openai": (
        "OpenAI messages",
        EXACT_MATCH,
        ["system: Be brief.", "user: What is in picture {}?", "user: <image>"],
    ),
    "swift": ("ms-swift", MATHEMATICS, ["system: Be brief.", "user: <image>What is in picture {}?"]),
    "webdataset": ("WebDataset", EXACT_MATCH, ["user: <image>What is in picture {}?"]),
}


@pytest.fixture(scope="module")
def patterns(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return published.write_all(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def client(patterns: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    strange = write_lines(tmp_path_factory.mktemp("strange") / "a.jsonl", [{"problem": "What?", "level": 3}])
    roots = {name: [pattern] for name, pattern in patterns.items()} | {"strange": [str(strange)]}
    with EmbeddedNode(memory_bytes=16 * 2**20, roots=roots) as node, Client(node.uri) as client:
        yield client


def config_of(client: Client, model: Path, train: object, *overrides: str) -> Config:
    config, *rest = runs.arguments(Path("unused"), model, "sets", "train.steps=1")
    sets = (f"dataplane.uri={client.uri}", f"data.train={train}", "data.eval=llava", "reward.function=null")
    return load_config(runs.ROOT / config, [*rest, *sets, *overrides])


def in_words(conversation: Conversation) -> list[str]:
    """Return a line for each turn."""
    return [
        f"{turn.role}: {''.join(part.text if part.kind == 'text' else f'<{part.kind}>' for part in turn.parts)}"
        for turn in conversation.turns
    ]


@pytest.mark.parametrize("name", published.LAYOUTS)
def test_a_set_of_another_project_needs_nothing_but_its_path(client: Client, tiny_dir: Path, name: str) -> None:
    config = config_of(client, tiny_dir, name)
    recipes, (found,) = load_recipes(tiny_dir), find_train_sets(client, config)
    layout, reward, turns = WANTED[name]
    assert (found.run_set.layout.name, found.run_set.reward) == (layout, reward)
    assert check_first_samples(client, config, recipes, found).words == "1 image each"
    start = RunStart(step=0, checkpoint=None, train_sets=(found.run_set,), eval_sets=())
    slots = [Slot(position=at, epoch=0, index=at) for at in range(published.NUM_SAMPLES)]
    prompts, notices = PromptSource(client, config, recipes, start, controller=0).load(slots)
    assert not notices
    for number, prompt in enumerate(prompts):
        assert in_words(prompt.conversation) == [turn.format(number) for turn in turns]
        assert (prompt.answer, prompt.reward) == (str(number), reward)
        (medium,) = prompt.media
        assert medium.lineage is not None and medium.lineage.source == content_digest(published.image(number))
        assert "base64" not in str(prompt.fields)


MIXED = "[{name: geo, path: verl, weight: 5}, {name: chat, path: llava, weight: 3, reward: 'math:hypot'}, " + (
    "{name: swift, path: swift, weight: 2, fields: {answer: solution}}]"
)


def test_mixed_sets_give_prompts_by_their_weights_each_with_its_reward(client: Client, tiny_dir: Path) -> None:
    config = config_of(client, tiny_dir, MIXED, "reward.function=math:dist")
    found, recipes = find_train_sets(client, config), load_recipes(tiny_dir)
    assert [one.run_set.reward for one in found] == ["math:dist", "math:hypot", "math:dist"]
    assert [one.key for one in found] == ["data.train[geo]", "data.train[chat]", "data.train[swift]"]
    order = PromptOrder(sources_of(config, found), seed=config.run.seed)
    (held_out,) = find_held_out_sets(client, config)
    sets = tuple(one.run_set for one in found)
    start = RunStart(step=0, checkpoint=None, train_sets=sets, eval_sets=(held_out.run_set,))
    source, slots = PromptSource(client, config, recipes, start, controller=0), order.take(20)
    source.prefetch(slots)
    prompts, notices = source.load(slots)
    assert not notices and [prompt.slot for prompt in prompts] == slots
    counts = {name: sum(slot.set_name == name for slot in slots) for name in ("geo", "chat", "swift")}
    assert counts == {"geo": 10, "chat": 6, "swift": 4}
    for prompt in prompts:
        number = prompt.slot.index
        assert prompt.answer == str(number)
        wanted = {"geo": "verl", "chat": "llava", "swift": "swift"}[prompt.slot.set_name]
        assert in_words(prompt.conversation) == [turn.format(number) for turn in WANTED[wanted][2]]
        assert prompt.reward == ("math:hypot" if prompt.slot.set_name == "chat" else "math:dist")


def test_an_unknown_layout_is_refused_with_the_samples_keys_and_the_nearest(client: Client, tiny_dir: Path) -> None:
    message = (
        r"data.train, first sample \(a.jsonl line 1\): its samples have level, problem, .*the nearest is EasyR1 "
        r"\(question: problem, answer: answer\), of which answer is missing; name the fields with data.question_field"
    )
    with pytest.raises(ConfigError, match=message):
        find_train_sets(client, config_of(client, tiny_dir, "strange"))
    named = config_of(client, tiny_dir, "strange", "data.question_field=problem", "data.answer_field=level")
    assert find_train_sets(client, named)[0].run_set.layout.answer_of({"level": 3}) == "3"


def test_columns_of_media_are_added_to_the_pattern_of_a_set(client: Client, tiny_dir: Path) -> None:
    sets = "[{name: a, path: 'x', fields: {media: [scan, b]}}, {name: b, path: 'x#drop=c', fields: {media: [d]}}]"
    config = config_of(client, tiny_dir, sets)
    assert [pattern_of(one) for one in config.data.train] == ["x#media=scan,b", "x#drop=c&media=d"]


def test_the_reward_of_a_set_is_looked_up_before_anything_starts(tiny_dir: Path, patterns: dict[str, str]) -> None:
    sets = f"[{{name: a, path: {patterns['llava']}, reward: 'no_such_module:f'}}]"
    config, *rest = runs.arguments(Path("unused"), tiny_dir, "sets", "train.steps=1", f"data.train={sets}")
    with pytest.raises(ConfigError, match="cannot import no_such_module"):
        check_run(load_config(runs.ROOT / config, [*rest, f"data.eval={patterns['llava']}"]))
