"""Tests of updates: the same numbers however the work is divided, and faults that would change them silently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from models.layout.parallel import Parallel
from tests.models.layouts import quick_first
from tests.yatt_mm.training import jobs
from tests.yatt_mm.training.ranks import RankPool
from tests.yatt_mm.training.tiny import MODELS, VOCAB_SIZE, build_folder

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "clip_grad": 0.5}


def test_ranks_are_ordered_tensor_then_data_then_pipeline_parallel(ranks: RankPool, untied_folder: Path) -> None:
    # controllers count on it when they pick the ranks of a replica
    assert ranks.run(4, jobs.place, untied_folder, Parallel(tp=2, dp=2)) == [
        (0, True, True),
        (0, True, False),
        (1, True, True),
        (1, True, False),
    ]
    assert ranks.run(4, jobs.place, untied_folder, Parallel(pp=2, dp=2)) == [
        (0, True, False),
        (1, True, False),
        (0, False, True),
        (1, False, True),
    ]


def test_two_runs_are_bit_identical(ranks: RankPool, untied_folder: Path) -> None:
    first, second = (ranks.run(2, jobs.train, untied_folder, Parallel(tp=2), 3, SETTINGS)[0] for _ in range(2))
    assert first["losses"] == second["losses"]
    assert first["norms"] == second["norms"]
    assert all(np.array_equal(first["weights"][name], second["weights"][name]) for name in first["weights"])


def test_replicas_stay_equal_when_images_are_dealt_to_ranks(ranks: RankPool, untied_folder: Path) -> None:
    # the tower is replicated over tensor parallelism: its copies must get the same update, bit for bit
    left, right = ranks.run(2, jobs.tower_after_training, untied_folder, Parallel(tp=2))
    assert left.keys() == right.keys()
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_an_image_is_asked_for_by_one_rank_of_the_first_stage_alone(ranks: RankPool, untied_folder: Path) -> None:
    asked = ranks.run(4, jobs.owned_media, untied_folder, Parallel(tp=2, pp=2))
    for micro, first in enumerate(asked[0]):
        for sample, wanted in enumerate(first):
            for medium in range(len(wanted)):
                assert sum(of_rank[micro][sample][medium] for of_rank in asked[:2]) == 1
                assert not any(of_rank[micro][sample][medium] for of_rank in asked[2:])
    assert any(any(any(own) for own in micro) for micro in asked[1])


def test_a_rank_without_the_pixels_that_it_encodes_says_so(ranks: RankPool, untied_folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"patches of an image of \(1, 8, 6\) patches are missing.*own_media"):
        ranks.run(1, jobs.logprobs_without_pixels, untied_folder)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(pp=2), Parallel(tp=2, sp=True)])
def test_numbers_do_not_depend_on_microbatches_nor_on_empty_ones(
    parallel: Parallel, ranks: RankPool, untied_folder: Path
) -> None:
    results = ranks.run(parallel.world_size, jobs.gradients_by_split, untied_folder, parallel)[0]
    reference = results.pop("together")
    for split, gradients in results.items():
        worst = max(relative_difference(gradients[name], reference[name]) for name in reference)
        assert worst < 1e-5, split


def test_text_alone_gives_the_vision_tower_no_gradient(ranks: RankPool, untied_folder: Path) -> None:
    gradients = ranks.run(1, jobs.text_only_gradients, untied_folder, Parallel())[0]
    assert all(not gradients[name].any() for name in gradients if name.startswith("visual."))
    assert gradients["lm_head.weight"].any()


def test_temperature_divides_the_logits(ranks: RankPool, untied_folder: Path) -> None:
    by_temperature = ranks.run(1, jobs.logprobs_at, untied_folder, (1.0, 1e6))[0]
    assert np.allclose(by_temperature[1e6], -np.log(VOCAB_SIZE), atol=1e-3)
    assert not np.allclose(by_temperature[1.0], by_temperature[1e6], atol=0.1)


@pytest.mark.parametrize("family", quick_first(MODELS, ("qwen2_5_vl",)))
def test_a_model_in_bfloat16_is_as_far_from_its_float32_as_bfloat16_rounds(
    family: str, ranks: RankPool, tmp_path: Path
) -> None:
    (worst,) = ranks.run(1, jobs.worst_of_bfloat16, build_folder(tmp_path, family))
    print(f"{family}: {worst:.1e}")
    assert 1e-4 < worst < 0.1


def test_warm_up_raises_the_learning_rate_linearly(ranks: RankPool, untied_folder: Path) -> None:
    assert ranks.run(1, jobs.learning_rates, untied_folder)[0] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_a_world_of_the_wrong_size_is_refused(ranks: RankPool, untied_folder: Path) -> None:
    with pytest.raises(AssertionError, match="1 ranks joined"):
        ranks.run(1, jobs.place, untied_folder, Parallel(dp=2))


def relative_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / (np.abs(wanted).max() + 1e-12))


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all_and_changes_nothing(
    poison: str, ranks: RankPool, untied_folder: Path
) -> None:
    wanted = ranks.run(2, jobs.train, untied_folder, Parallel(dp=2), 3, {"clip_grad": 0.5})[0]
    for found in ranks.run(2, jobs.update_after_poison, untied_folder, Parallel(dp=2), poison):
        assert found["was_skipped"]
        assert all(np.array_equal(found["before"][name], found["after"][name]) for name in found["before"])
        assert (found["losses"], found["norms"]) == (wanted["losses"][2:], wanted["norms"][2:])
