"""Tests of stopping and continuing: bit for bit in the same layout, with the same losses in another layout, and the
exported folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from models.freeze import Part
from models.layout.parallel import Parallel
from tests.models.layouts import quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import build_folder

TP2, PP2, DP2 = Parallel(tp=2), Parallel(pp=2), Parallel(dp=2)
MOVES = {
    "dp2 to dp2": (DP2, DP2),
    "dp2 to tp2 sp": (DP2, Parallel(tp=2, sp=True)),
    "dp2 to one rank": (DP2, Parallel()),
    "tp2 to tp2": (TP2, TP2),
    "tp2 to one rank": (TP2, Parallel()),
    "tp2 to pp2": (TP2, PP2),
    "pp2 to pp2": (PP2, PP2),
    "pp2 to dp2": (PP2, DP2),
    "one rank to pp2": (Parallel(), PP2),
    "tp2 pp2 to dp2": (Parallel(tp=2, pp=2), DP2),
    "tp2 dp2 to tp2 pp2": (Parallel(tp=2, dp=2), Parallel(tp=2, pp=2)),
}
"""The layouts in which a checkpoint is saved, and in which it is loaded."""
EP2 = Parallel(ep=2, dp=2)
EXPERT_MOVES = {
    "ep2 to ep2": (EP2, EP2),
    "ep2 to one rank": (EP2, Parallel()),
    "one rank to ep2": (Parallel(), EP2),
    "tp2 sp ep2 to dp2": (Parallel(tp=2, sp=True, ep=2), DP2),
}
"""The same layouts for a model with experts: one optimizer without expert parallelism, two chained ones with it."""
QUICK = (
    "tp2 to tp2",
    "one rank to pp2",
    "tp2 dp2 to tp2 pp2",
    "tp2 sp ep2 to dp2",
)
"""The moves of `make test`; the others are for `make parity`."""


class Saves:
    """The checkpoints by (model, layout, dtype). Each state is written only once for all tests, in two ways: while
    training waits, and while training continues."""

    def __init__(self, ranks: RankPool, root: Path) -> None:
        self._ranks = ranks
        self._root = root
        self._done: dict[tuple, tuple[Path, dict[str, Any]]] = {}

    def of(self, folder: Path, layout: Parallel, dtype: str = "float32") -> tuple[Path, dict[str, Any]]:
        """Return the folder in which ranks with this layout saved two checkpoints, and the results of the same ranks in
        the two updates after that."""
        key = (folder, layout, dtype)
        if key not in self._done:
            directory = self._root / str(len(self._done))
            results = self._ranks.run(layout.world_size, jobs.save_both_ways, folder, layout, directory, dtype)
            self._done[key] = directory, results[0]
        return self._done[key]


@pytest.fixture(scope="module")
def saves(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    return Saves(ranks, tmp_path_factory.mktemp("saves"))


@pytest.mark.parametrize("move", quick_first(MOVES, QUICK))
def test_a_checkpoint_continues_in_any_layout_however_it_was_written(
    move: str, ranks: RankPool, untied_folder: Path, saves: Saves
) -> None:
    check_move(ranks, saves, untied_folder, *MOVES[move])


@pytest.mark.parametrize("move", quick_first(EXPERT_MOVES, QUICK))
def test_experts_move_between_layouts_with_and_without_expert_parallelism(
    move: str, ranks: RankPool, experts_folder: Path, saves: Saves
) -> None:
    check_move(ranks, saves, experts_folder, *EXPERT_MOVES[move])


def test_a_virtual_pipeline_moves_to_a_plain_one(ranks: RankPool, deep_folder: Path, saves: Saves) -> None:
    check_move(ranks, saves, deep_folder, Parallel(pp=2, vpp=2), PP2)


def check_move(ranks: RankPool, saves: Saves, folder: Path, first: Parallel, second: Parallel) -> None:
    directory, wanted = saves.of(folder, first)
    assert not wanted["was_complete"]  # it was written after the updates that it must not contain
    for found in ranks.run(second.world_size, jobs.load_both, folder, second, directory)[0].values():
        if first == second:
            assert found["losses"] == wanted["losses"]
            assert found["norms"] == wanted["norms"]
            check_same_bits(found["weights"], wanted["weights"])
        else:
            assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
            assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


@pytest.mark.parametrize(("first", "second"), [(Parallel(), PP2), (PP2, Parallel())])
def test_a_tied_head_moves_between_one_stage_and_two(
    first: Parallel, second: Parallel, ranks: RankPool, tied_folder: Path, tmp_path: Path
) -> None:
    wanted = ranks.run(first.world_size, jobs.train_and_save, tied_folder, first, tmp_path)[0]
    moved = ranks.run(second.world_size, jobs.load_and_train, tied_folder, second, tmp_path)[0]
    assert moved["losses"] == pytest.approx(wanted["losses"], rel=1e-6)


def test_bfloat16_continues_exactly_from_its_float32_main_weights(
    ranks: RankPool, untied_folder: Path, saves: Saves
) -> None:
    directory, wanted = saves.of(untied_folder, DP2, "bfloat16")
    for found in ranks.run(2, jobs.load_both, untied_folder, DP2, directory, "bfloat16")[0].values():
        assert found["losses"] == wanted["losses"]
        check_same_bits(found["weights"], wanted["weights"])


def test_a_save_that_fails_while_ranks_train_says_where_and_why(
    ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    for said in ranks.run(2, jobs.save_where_it_cannot, untied_folder, DP2, tmp_path):
        assert said == f"cannot write {tmp_path / 'checkpoint'}: No such file or directory"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.parity)])
def test_frozen_parts_are_saved_once_and_move_between_layouts(
    dtype: str, ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    frozen = {"freeze": ("tower", "language")}
    wanted = ranks.run(2, jobs.train_and_save, untied_folder, DP2, tmp_path, dtype, frozen)[0]
    for layout in (DP2, TP2):
        found = ranks.run(2, jobs.load_and_train, untied_folder, layout, tmp_path, dtype, frozen)[0]
        assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6 if dtype == "float32" else 1e-2)
        check_same_bits(found["loaded"], wanted["saved"])
    with pytest.raises(AssertionError, match=r"was frozen when the checkpoint was saved, .* freeze it again"):
        ranks.run(2, jobs.load_and_train, untied_folder, DP2, tmp_path, dtype)


def test_frozen_experts_move_too(ranks: RankPool, experts_folder: Path, tmp_path: Path) -> None:
    frozen = {"freeze": ("language",)}
    wanted = ranks.run(2, jobs.train_and_save, experts_folder, EP2, tmp_path, "float32", frozen)[0]
    found = ranks.run(1, jobs.load_and_train, experts_folder, Parallel(), tmp_path, "float32", frozen)[0]
    check_same_bits(found["loaded"], wanted["saved"])


@pytest.mark.parametrize("freeze", [(), pytest.param(("language",), marks=pytest.mark.parity)])
def test_each_of_eight_replicas_holds_and_writes_its_eighth(
    freeze: tuple[Part, ...], ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    held = ranks.run(8, jobs.save_part, untied_folder, Parallel(dp=8), tmp_path, freeze)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("part-*.safetensors"))]
    assert len(sizes) == 8
    for nbytes, size in zip(held, sizes, strict=True):
        assert nbytes == pytest.approx(sum(held) / 8, rel=0.1)
        assert size == pytest.approx(sum(sizes) / 8, rel=0.1)


@pytest.mark.parity
def test_a_save_needs_no_more_host_memory_than_the_rank_owns(ranks: RankPool, tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "wide", "qwen2_5_vl_wide")
    for nbytes, grown in ranks.run(2, jobs.growth_in_a_save, folder, DP2, tmp_path / "saved"):
        assert nbytes > 70e6 and 0.5 < grown / nbytes < 1.3


def test_a_checkpoint_before_the_first_update_changes_nothing(
    ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    wanted = ranks.run(2, jobs.train, untied_folder, Parallel(dp=2), 2, {"warmup_steps": 3, "weight_decay": 0.1})[0]
    saved = ranks.run(2, jobs.save_then_train, untied_folder, Parallel(dp=2), tmp_path)[0]
    loaded = ranks.run(2, jobs.load_and_train, untied_folder, Parallel(dp=2), tmp_path)[0]
    check_same_bits(saved["weights"], wanted["weights"])
    check_same_bits(loaded["weights"], wanted["weights"])


def test_the_saved_folder_has_the_trained_bits_and_loads_in_transformers(
    ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    trained = ranks.run(2, jobs.train_and_save, untied_folder, Parallel(pp=2), tmp_path)[0]["saved"]
    folder = tmp_path / "hf"
    check_same_bits(load_file(folder / "model.safetensors"), trained)
    assert {path.name for path in folder.iterdir()} == {path.name for path in untied_folder.iterdir()}
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert np.array_equal(model.lm_head.weight.detach().numpy(), trained["lm_head.weight"])


def test_a_tied_head_that_the_folder_saved_too_is_written_again(
    ranks: RankPool, tied_folder: Path, tmp_path: Path
) -> None:
    folder = with_tensor(tied_folder, tmp_path / "model", "lm_head.weight", like="model.embed_tokens.weight")
    ranks.run(2, jobs.train_and_save, folder, PP2, tmp_path, "bfloat16")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    assert saved.keys() == load_file(folder / "model.safetensors").keys()
    assert np.array_equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    # the folder keeps the dtype of the one it came from
    assert all(tensor.dtype == np.float32 for tensor in saved.values())


def test_a_folder_with_tensors_that_the_model_lacks_is_refused_at_the_start_on_every_rank(
    ranks: RankPool, untied_folder: Path, tmp_path: Path
) -> None:
    folder = with_tensor(untied_folder, tmp_path / "model", "model.layers.0.adapter", like="model.norm.weight")
    with pytest.raises(AssertionError, match=r"(?s)does not have: model\.layers\.0\.adapter \(1 in all\)") as said:
        ranks.run(2, jobs.place, folder, Parallel(pp=2))
    assert str(said.value).count("ValueError: the checkpoint at") == 2


def with_tensor(source: Path, folder: Path, name: str, *, like: str) -> Path:
    """Return a copy of a model folder with one more tensor."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    save_file(weights | {name: weights[like].copy()}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_unfinished_checkpoint_is_named(ranks: RankPool, untied_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(AssertionError, match=r"no finished checkpoint in .*checkpoint: part-00000-of-00001"):
        ranks.run(1, jobs.load_and_train, untied_folder, Parallel(), tmp_path)


def check_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert np.array_equal(found[name], wanted[name]), name
