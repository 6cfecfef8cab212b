"""Tests of a small version of the compare example: pairs of scans with a conversation around them, a warm-up, and a run
of two steps that shows both images where the conversation says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.nn import functional
from transformers import AutoModelForImageTextToText, AutoTokenizer

from dataplane.core.digests import content_digest
from examples.compare import warmup
from examples.compare.data import ANSWERS, CHAT, QUESTION, SYSTEM, Split, make_split, write_shards
from examples.compare.prepare import TOKENIZER_TEXT, main, read_stamp
from examples.digits import data as digits
from examples.digits.model import build_model_folder, load_processor
from examples.preparing import STAMP_NAME, WarmupError
from tests.yatt_mm import runs
from yatt_mm.keeper.table import Row, read_rows, table_path

CONFIG = "configs/compare_cpu.yaml"
NUM_TRAIN, NUM_HELD_OUT = 32, 24
NUM_STEPS, GROUP_SIZE = 2, 4
READING_ACCURACY, NUM_PAIR_STEPS = 0.5, 20
"""Where the stages of the small warm-up end: its model answers by what is in the images, often wrongly."""
USER = [
    {"type": "text", "text": "Which digit is larger, "},
    {"type": "image"},
    {"type": "text", "text": " or "},
    {"type": "image"},
    {"type": "text", "text": "?"},
]
CONVERSATION = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}, {"role": "user", "content": USER}]
"""What the model must read, in the form that chat templates take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A small version of the example in a folder: shards, and a model that reads about half of the scans."""

    folder: Path
    """The folder with the shards `train-*.tar` and `eval-*.tar` and with `model`; runs write into its folder `runs`."""
    before: bytes
    """The weights of the model before its warm-up."""
    made: warmup.Warmup

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return self.folder / "model"


@pytest.fixture(scope="module")
def split() -> Split:
    return make_split(seed=0, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT)


@pytest.fixture(scope="module")
def small(split: Split, tmp_path_factory: pytest.TempPathFactory) -> Small:
    folder = tmp_path_factory.mktemp("compare")
    write_shards(folder, split)
    build_model_folder(folder / "model", seed=0, text=TOKENIZER_TEXT)
    before = (folder / "model" / "model.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "READING_ACCURACY", READING_ACCURACY)
        patch.setattr(warmup, "NUM_PAIR_STEPS", NUM_PAIR_STEPS)
        patch.setattr(warmup, "ACCURACY_RANGE", (0.0, 1.0))
        made = warmup.warm_up(folder / "model", split)
    return Small(folder=folder, before=before, made=made)


def test_the_answer_is_the_larger_digit_and_no_scan_is_in_both_parts() -> None:
    from sklearn.datasets import load_digits  # takes a second

    split = make_split(seed=1, num_train=400, num_held_out=200)
    scans = digits.make_split(seed=1)
    targets = load_digits().target
    digit_of = {scan.png: int(targets[int(scan.key)]) for scan in (*scans.train, *scans.held_out)}
    for pairs in (split.train, split.held_out):
        for pair in pairs:
            first, second = (digit_of[png] for png in pair.pngs)
            assert first != second and pair.digits == (str(first), str(second))
            assert pair.answer == str(max(first, second))
        assert {pair.answer for pair in pairs} == set(ANSWERS)
        assert len({pair.key for pair in pairs}) == len(pairs)
    train, held_out = ({png for pair in pairs for png in pair.pngs} for pairs in (split.train, split.held_out))
    assert train and held_out and not train & held_out


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(split: Split, tmp_path: Path) -> None:
    again, other = (make_split(seed=seed, num_train=NUM_TRAIN, num_held_out=NUM_HELD_OUT) for seed in (0, 1))
    first, second = (write_shards(tmp_path / name, part) for name, part in (("1", split), ("2", again)))
    assert [path.name for path in first] == [*(f"train-00000{shard}.tar" for shard in range(3)), "eval-000000.tar"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert other.held_out != split.held_out


def test_a_sample_is_two_images_and_a_chat(split: Split, tmp_path: Path) -> None:
    paths = [str(path) for path in write_shards(tmp_path, split)]
    samples = list(webdataset.WebDataset(paths, shardshuffle=False))
    assert len(samples) == NUM_TRAIN + NUM_HELD_OUT
    for sample, pair in zip(samples[-NUM_HELD_OUT:], split.held_out):
        assert (sample["0.png"], sample["1.png"]) == pair.pngs
        assert json.loads(sample["json"]) == {"question": list(CHAT), "answer": pair.answer}


def test_the_conversation_has_a_system_turn_and_text_around_two_images() -> None:
    assert warmup.conversation().messages() == CONVERSATION


@pytest.mark.parity
def test_answers_are_single_tokens(small: Small) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small.model)
    assert all(len(tokenizer(answer)["input_ids"]) == 1 for answer in ANSWERS)


@pytest.mark.parity
def test_the_warm_up_teaches_reading_and_refuses_to_save_what_learned_too_little(
    small: Small, split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = (small.model / "model.safetensors").read_bytes()
    assert after != small.before
    assert small.made.reading_accuracy >= READING_ACCURACY and small.made.num_steps > NUM_PAIR_STEPS
    monkeypatch.setattr(warmup, "MAX_READING_STEPS", 2)
    with pytest.raises(WarmupError, match=r"after 2 warm-up steps; wanted 0\.97 to 1\.0.*compare/warmup"):
        warmup.warm_up(small.model, split)
    assert (small.model / "model.safetensors").read_bytes() == after


def test_the_warm_up_says_of_a_pair_one_digit_or_the_other_by_a_coin() -> None:
    split = make_split(seed=0, num_train=400, num_held_out=1)
    tossed = warmup.toss(split.train, seed=0)
    assert [pair.pngs for pair in tossed] == [pair.pngs for pair in split.train]
    assert all(pair.answer in pair.digits for pair in tossed)
    assert 0.4 < np.mean([pair.answer == max(pair.digits) for pair in tossed]) < 0.6
    assert 0.4 < np.mean([pair.answer == pair.digits[0] for pair in tossed]) < 0.6


def test_a_broken_stamp_is_not_taken_for_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STAMP_NAME).write_text('{"seed": 0')
    assert read_stamp(tmp_path, seed=0) is None
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--force" in capsys.readouterr().out


@pytest.fixture(scope="module")
def run(small: Small) -> runs.Finished:
    """Two steps of the example's config, with one engine and one rank; each training pair is used once."""
    overrides = (
        "reward.function=yatt_mm.rewards.functions:exact_match",
        "rollouts.keep=all",
        "sampling.replace_groups=false",
        f"train.steps={NUM_STEPS}",
        f"train.prompts_per_step={NUM_TRAIN // NUM_STEPS}",
        f"rollout.group_size={GROUP_SIZE}",
        "checkpoint.every=0",
        *runs.ONE_OF_EACH,
    )
    _, *rest = runs.arguments(small.folder, small.model, "compare", *overrides)
    return runs.run([CONFIG, *rest])


def _rows(small: Small, step: int, kind: str) -> list[Row]:
    rows = read_rows(table_path(small.folder / "runs" / "compare", step))
    return [row for row in rows if row["split"] == kind]


@pytest.mark.parity
def test_a_run_trains_on_every_pair_and_engine_and_trainer_agree(
    run: runs.Finished, small: Small, split: Split
) -> None:
    assert run.status == 0, run.output
    assert run.left_behind == []
    first, *steps = records = runs.metrics(small.folder, "compare")
    assert [record["step"] for record in records if "eval/accuracy" in record] == [0, NUM_STEPS]
    assert first["eval/accuracy"] == pytest.approx(small.made.accuracy, abs=1.01 / NUM_HELD_OUT), "one may be a tie"
    for record in steps:
        assert record["sampling/num_groups"] == NUM_TRAIN // NUM_STEPS
        assert record["rollout/logprob_diff_mean"] < 1e-5
        assert record["rollout/logprob_diff_max"] < 1e-3
        assert record["train/grad_norm"] > 0 and 0 < record["reward/mean"] < 1
    distinct = {png for pair in (*split.train, *split.held_out) for png in pair.pngs}
    last = records[-1]
    assert last["dataplane/num_media"] == last["dataplane/num_processed"] == len(distinct)
    assert last["dataplane/num_recomputed"] == 0


@pytest.mark.parity
def test_kept_rollouts_show_the_conversation_and_both_scans_in_its_order(
    run: runs.Finished, small: Small, split: Split
) -> None:
    assert run.status == 0, run.output
    rows = [*_rows(small, 0, "eval"), *_rows(small, 1, "train"), *_rows(small, NUM_STEPS, "train")]
    assert len(rows) == NUM_HELD_OUT + NUM_TRAIN * GROUP_SIZE
    pairs = {tuple(map(content_digest, pair.pngs)): pair for pair in (*split.train, *split.held_out)}
    for row in rows:
        assert json.loads(row["conversation"]) == CONVERSATION and row["question"] == QUESTION
        pair = pairs[tuple(medium["source"] for medium in row["media"])]
        assert row["answer"] == pair.answer and row["reward"] == float(row["response"].strip() == pair.answer)
        for png, medium in zip(pair.pngs, row["media"]):
            pixels = [np.asarray(Image.open(io.BytesIO(file)).convert("L")) for file in (png, medium["thumbnail"])]
            assert np.abs(pixels[0].astype(int) - pixels[1]).mean() < 4


@pytest.mark.parity
def test_the_engine_reads_both_images_where_transformers_reads_them(
    run: runs.Finished, small: Small, split: Split
) -> None:
    """Test the log-probabilities of the greedy answers, which are others if the two scans change places."""
    assert run.status == 0, run.output
    rows = sorted(_rows(small, 0, "eval"), key=lambda row: row["index"])
    found = np.array([row["logprob_mean"] for row in rows])
    responses = [row["token_ids"] for row in rows]
    pairs = [pair.pngs for pair in split.held_out]
    wanted = _logprob_means(small.model, pairs, responses)
    others = _logprob_means(small.model, [pngs[::-1] for pngs in pairs], responses)
    assert np.abs(found - wanted).max() < 1e-4
    assert np.abs(found - others).mean() > 1e-3


@torch.no_grad()
def _logprob_means(model_dir: Path, pairs: Iterable[tuple[bytes, ...]], responses: list[list[int]]) -> np.ndarray:
    """Return [B] the mean log-probability of the tokens of each response, as transformers reads pairs of scans."""
    model, processor = AutoModelForImageTextToText.from_pretrained(model_dir), load_processor(model_dir)
    prompt = processor.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False)
    means = []
    for pngs, response in zip(pairs, responses, strict=True):
        images = [Image.open(io.BytesIO(png)).convert("RGB") for png in pngs]
        inputs = processor(text=[prompt], images=images, return_tensors="pt")
        said = torch.tensor([response])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], said], dim=1)
        inputs["mm_token_type_ids"] = functional.pad(inputs["mm_token_type_ids"], (0, len(response)))
        inputs.pop("attention_mask")
        logits = model(**inputs, use_cache=False, logits_to_keep=len(response) + 1).logits[0, :-1]
        means.append(functional.log_softmax(logits, dim=-1).gather(1, said.T).mean().item())
    return np.array(means)
