"""Tests a run of three controllers on a mixture of sets in the layouts of other projects, of samples with two images or
a video: the pixels pass through it, and no controller grows. The vision tower is frozen."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from examples.digits.model import MAX_IMAGE_SIDE, build_model_folder
from examples.motion.prepare import TOKENIZER_TEXT
from tests.dataplane.clips import encode_video
from tests.yatt_mm import runs
from yatt_mm.keeper.table import read_rows, table_path

pytestmark = pytest.mark.alone

SETS = {"verl": 48, "llava": 32, "swift": 16}
"""The samples of each training set, in the proportion of its weight; a run of three steps uses each sample once. The
first set has one sample more, which is too large for `data.filter`."""
NUM_EVAL, NUM_STEPS, NUM_PROMPTS = 6, 3, 32
NUM_MEDIA = {"verl": 2, "llava": 1, "swift": 2, "eval": 1}
SIDE, NUM_FRAMES = 336, 4
NUM_CONTROLLERS = 3
LARGE = 20
"""The sample that is too large."""
CLIPS = {"num_samples": 4, "temperature": 1.0, "metrics": ["mean@2", "pass@2", "maj@4"], "num_prompts": NUM_EVAL - 1}
MIB = 2**20
QUESTION = "What is it?"


def write_verl(path: Path, numbers: range, draw: np.random.Generator, *, large: int) -> None:
    """Write samples with two images, as verl writes them. The images of one of them, `large`, have more pixels."""
    rows = [
        {
            "data_source": "noise",
            "prompt": [{"role": "user", "content": f"<image>{QUESTION}<image>"}],
            "images": [{"bytes": _jpeg(draw, SIDE + 8 * (number == large)), "path": None} for _ in range(2)],
            "reward_model": {"style": "rule", "ground_truth": str(number % 10)},
        }
        for number in numbers
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=8)


def write_llava(path: Path, numbers: range, draw: np.random.Generator) -> None:
    """Write samples with one video, as LLaVA writes them."""
    samples = []
    for number in numbers:
        frames = draw.integers(0, 256, (NUM_FRAMES, SIDE, SIDE, 3), np.uint8)
        name = f"{path.stem}-{number}.mp4"
        (path.parent / name).write_bytes(encode_video(path.with_suffix(".mp4"), "mp4v", frames, fps=4.0))
        turns = [{"from": "human", "value": f"<video>\n{QUESTION}"}, {"from": "gpt", "value": str(number % 10)}]
        samples.append({"id": str(number), "video": name, "conversations": turns})
    path.write_text(json.dumps(samples))


def write_swift(path: Path, numbers: range, draw: np.random.Generator) -> None:
    """Write samples with two images, as ms-swift writes them."""
    with path.open("w") as lines:
        for number in numbers:
            names = [f"{path.stem}-{number}-{place}.jpg" for place in range(2)]
            for name in names:
                (path.parent / name).write_bytes(_jpeg(draw))
            turns = [{"role": "system", "content": "Look."}, {"role": "user", "content": f"<image><image>{QUESTION}"}]
            lines.write(json.dumps({"messages": turns, "images": names, "solution": str(number % 10)}) + "\n")


def _jpeg(draw: np.random.Generator, side: int = SIDE) -> bytes:
    image = io.BytesIO()
    Image.fromarray(draw.integers(0, 256, (side, side, 3), np.uint8)).save(image, "JPEG")
    return image.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    build_model_folder(path / "model", seed=0, text=TOKENIZER_TEXT)
    for file in (path / "model").glob("*processor_config.json"):  # its scans are smaller than these media
        file.write_text(file.read_text().replace(str(MAX_IMAGE_SIDE**2), str(SIDE**2)))
    draw = np.random.default_rng(0)
    write_verl(path / "verl.parquet", range(SETS["verl"] + 1), draw, large=LARGE)
    write_llava(path / "llava.json", range(SETS["llava"]), draw)
    write_swift(path / "swift.jsonl", range(SETS["swift"]), draw)
    write_llava(path / "eval.json", range(NUM_EVAL), draw)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> runs.Finished:
    endings = {"verl": "parquet", "llava": "json", "swift": "jsonl"}
    sets = [{"name": name, "path": f"{folder}/{name}.{endings[name]}", "weight": num} for name, num in SETS.items()]
    overrides = (
        f"data.train={json.dumps(sets)}",
        f"data.eval={folder}/eval.json",
        f"eval.sets.clips={json.dumps(CLIPS | {'path': f'{folder}/eval.json'})}",
        "rollouts.keep=all",
        "train.freeze=[tower]",
        "algorithm.kl.where=loss",
        "reference.renew_every=2",
        f"controllers.num={NUM_CONTROLLERS}",
        f"train.steps={NUM_STEPS}",
        f"train.prompts_per_step={NUM_PROMPTS}",
        "rollout.group_size=2",
        "sampling.replace_groups=false",
        "rollout.max_images_per_prompt=2",
        "rollout.max_videos_per_prompt=1",
        "rollout.max_model_len=512",
        "data.video.fps=4",
        f"data.filter.max_pixels={SIDE * SIDE}",
        "data.filter.max_prompt_tokens=340",  # no prompt has more, but more bytes: controllers count the tokens
        "dataplane.memory=256MiB",
        "eval.every=3",
        "checkpoint.every=0",
        "placement.num_devices=1",
        "rollout.num_engines=1",
    )
    return runs.run(runs.arguments(folder, folder / "model", "media", *overrides))


def test_a_run_on_images_and_videos_trains_on_every_sample_and_leaves_nothing_behind(
    run: runs.Finished, folder: Path
) -> None:
    assert run.status == 0, run.output
    assert run.left_behind == []
    records = runs.metrics(folder, "media")
    used = dict.fromkeys(SETS, 0)
    for step, record in enumerate(records[1:], 1):
        assert record["sampling/num_groups"] == NUM_PROMPTS
        for name, num_samples in SETS.items():
            used[name] += record[f"sets/{name}/num_prompts"]
            assert abs(used[name] - num_samples * step / NUM_STEPS) < 1, "by weight, after every step"
            assert 0 <= record[f"sets/{name}/reward_mean"] <= 1
        assert record["train/grad_norm"] > 0
        assert record["rollout/logprob_diff_mean"] < 1e-5
    num_media = sum(NUM_MEDIA[name] * num for name, num in {**SETS, "eval": NUM_EVAL}.items()) + NUM_MEDIA["verl"]
    assert records[-1]["dataplane/num_media"] == records[-1]["dataplane/num_processed"] == num_media
    assert records[-1]["dataplane/num_recomputed"] == 0


def test_the_sample_that_the_filter_leaves_out_is_replaced_and_told(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    (notice,) = map(json.loads, (folder / "runs" / "media" / "quarantine.jsonl").read_text().splitlines())
    assert (notice["set"], notice["index"], notice["is_filtered"]) == ("verl", LARGE, True)
    assert notice["reason"] == "it has images of 344x344 = 118336 pixels; data.filter.max_pixels is 112896"
    records = runs.metrics(folder, "media")
    assert sum(record.get("data/num_filtered", 0) for record in records) == 1
    assert not any(record.get("data/num_quarantined", 0) for record in records)
    assert "1 sample was left out, 1 of them by data.filter; " in run.output
    rows = itertools.chain.from_iterable(
        read_rows(table_path(folder / "runs" / "media", step)) for step in range(1, NUM_STEPS + 1)
    )
    trained = {row["index"] for row in rows if row["set"] == "verl"}
    assert trained == set(range(SETS["verl"] + 1)) - {LARGE}


def test_the_policy_leaves_its_reference_until_it_takes_its_place(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    first, second, third = (record["train/kl"] for record in runs.metrics(folder, "media")[1:])
    assert 0 < first < second, "they are the same model in the first of the two updates of a step"
    assert third < second / 2, "the policy after step 2 is the reference of step 3"
    renewed = folder / "runs" / "media" / "reference"
    assert [path.name for path in renewed.iterdir()] == ["step_000002"]


def test_the_frozen_tower_stays_as_it_is_and_the_rest_is_trained(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    before, after = (_weights(path) for path in (folder / "model", folder / "runs" / "media" / "hf"))
    assert before.keys() == after.keys()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {name for name in changed if "visual" in name} == {name for name in before if "visual.merger" in name}
    assert {name for name in before if "visual" not in name} <= changed


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def test_kept_rollouts_show_images_and_strips_of_videos(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    for step in range(NUM_STEPS + 1):
        for row in read_rows(table_path(folder / "runs" / "media", step)):
            kinds = [medium["kind"] for medium in row["media"]]
            assert kinds == (["video"] if row["set"] in ("llava", "eval", "clips") else ["image", "image"])
            assert QUESTION in row["question"]
            assert row["conversation"].startswith('[{"role": "system"') == (row["set"] == "swift")
            for medium in row["media"]:
                assert 0 < len(medium["thumbnail"]) <= 8192
                width, height = Image.open(io.BytesIO(medium["thumbnail"])).size
                assert width == height * (1 if medium["kind"] == "image" else NUM_FRAMES)


def test_several_samples_of_a_held_out_set_are_measured_as_they_were_kept(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    for record in [runs.metrics(folder, "media")[0], runs.metrics(folder, "media")[-1]]:
        rows = [
            row for row in read_rows(table_path(folder / "runs" / "media", record["step"])) if row["split"] == "eval"
        ]
        assert {row["set"] for row in rows} == {"eval", "clips"}
        groups = [[row for row in rows if (row["set"], row["index"]) == ("clips", at)] for at in range(NUM_EVAL - 1)]
        assert [len(group) for group in groups] == [4] * (NUM_EVAL - 1) and record["eval/clips/num_samples"] == 20
        rewards = [[row["reward"] for row in group] for group in groups]
        assert record["eval/clips/accuracy"] == pytest.approx(np.mean(rewards))
        assert record["eval/clips/mean@2"] == pytest.approx(np.mean([group[:2] for group in rewards]))
        pairs = [np.mean([max(pair) for pair in itertools.combinations(group, 2)]) for group in rewards]
        assert record["eval/clips/pass@2"] == pytest.approx(np.mean(pairs))
        texts = [[row["response"].strip() for row in group] for group in groups]
        chosen = [max(said, key=lambda text: (said.count(text), -said.index(text))) for said in texts]
        right = [group[said.index(text)] for group, said, text in zip(rewards, texts, chosen)]
        assert record["eval/clips/maj@4"] == pytest.approx(np.mean(right))
        greedy = [row["reward"] for row in rows if row["set"] == "eval"]
        assert (record["eval/accuracy"], len(greedy)) == (pytest.approx(np.mean(greedy)), NUM_EVAL)


def test_no_controller_grows_while_the_pixels_pass(run: runs.Finished, folder: Path) -> None:
    assert run.status == 0, run.output
    first, second, *_, last = runs.metrics(folder, "media")
    passed, grown = (
        [last[name] - before[name] for before in (first, second)]
        for name in ("dataplane/processed_bytes", "controller/rss_bytes_max")
    )
    assert passed[0] > 64 * MIB and passed[1] > 32 * MIB
    assert grown[0] < 16 * MIB, "with all that the first step loads"
    assert grown[1] < passed[1] / NUM_CONTROLLERS / 2, "after it: half of what came for this controller"
