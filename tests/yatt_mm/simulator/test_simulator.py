"""Tests of the simulator: numbers computed by hand; no request is lost; no layout is faster than the lower bound; and
the promises of the placement policy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.moving_split import NEAR, measure, plain
from tests.yatt_mm.simulated import engine, override, simulation, tree
from yatt_mm.common.errors import ConfigError
from yatt_mm.placement.engine_time import EngineTime
from yatt_mm.simulate import main
from yatt_mm.simulator.asynchronous_layout import asynchronous
from yatt_mm.simulator.cells import AWAKE, Cells, Use
from yatt_mm.simulator.config import load_simulation, parse_simulation
from yatt_mm.simulator.events import Events
from yatt_mm.simulator.fleet import Fleet
from yatt_mm.simulator.layouts import NAMES
from yatt_mm.simulator.lengths import draw_lengths
from yatt_mm.simulator.modelled_engine import Request
from yatt_mm.simulator.report import conclusion
from yatt_mm.simulator.results import LayoutResult, StepTimes
from yatt_mm.simulator.search import find_best
from yatt_mm.simulator.turn_layouts import external, full, partial_dynamic, partial_static

CONFIGS = Path(__file__).parents[3] / "configs" / "simulate"


# ---------------------------------------------------------------- hand-worked: two devices, three requests


def test_three_requests_on_two_devices_take_the_time_worked_out_by_hand_in_each_layout() -> None:
    """Test with responses of 10 s, verdicts of 4 s and updates of 10 s a sample; engines and ranks take one at a
    time."""
    config = simulation()
    # All answer: two until 10 s, the third until 20 s. All judge: two until 24 s, the third until 28 s.
    # Then one device trains two samples, the other one.
    assert full(config).rollout_s == pytest.approx(28)
    assert full(config).step_s == pytest.approx(28 + 20)
    # One answers until 10, 20, 30 s, the other judges each at once: the last until 34 s.
    assert partial_static(config, 1).rollout_s == pytest.approx(34)
    assert partial_static(config, 1).step_s == pytest.approx(34 + 20)
    # External, streaming: the same phase; one device trains for 30 s. Not streaming: three verdicts after 30 s.
    streaming = simulation(external__streams=True)
    assert external(streaming, 1, "x").step_s == pytest.approx(34 + 30)
    assert external(config, 1, "x").rollout_s == pytest.approx(30 + 12)


def test_switches_publishing_and_prefill_add_what_they_cost() -> None:
    config = simulation(
        workload__prompt_tokens=5,
        rollout=engine(decode_fixed_s=1.0, prefill_per_token_s=0.1, sleep_s=1.0, wake_s=2.0),
        genrm=engine(decode_fixed_s=1.0, sleep_s=3.0, wake_s=4.0),
        publish_s=7.0,
    )
    result = full(config)
    # Each response takes 0.5 s longer; between the two phases rollout goes to sleep (1 s) and the judges wake up (4 s).
    assert result.rollout_s == pytest.approx(2 * 10.5 + (1 + 4) + 2 * 4)
    # Before: waking (2 s). After: judges go to sleep (3 s), a device trains two samples of 15
    # tokens, publishing (7 s).
    assert result.step_s == pytest.approx(2 + result.rollout_s + 3 + 30 + 7)


def test_sequences_of_a_batch_slow_each_other_down_and_share_their_prompt() -> None:
    config = simulation(
        devices={"num": 2, "per_cell": 1},
        workload__prompts_per_step=1,
        workload__group_size=4,
        workload__prompt_tokens=100,
        rollout=engine(
            decode_fixed_s=1.0, decode_per_sequence_s=0.25, prefill_per_token_s=0.1, request_s=0.5, max_num_seqs=4
        ),
        genrm=engine(decode_fixed_s=1e-6),
    )
    # The prompt is read once (10 s), each request costs 0.5 s, then ten steps of 1 + 4 x 0.25 s.
    assert partial_static(config, 1).rollout_s == pytest.approx(10 + 4 * 0.5 + 10 * 2)


def test_a_fleet_is_crowded_while_it_has_more_requests_than_fill_it() -> None:
    events = Events()
    fleet = Fleet(simulation(rollout=engine(decode_fixed_s=1.0)).rollout, 1, events, lambda request: None)
    for cell in range(2):
        fleet.wake(cell)
    fleet.submit([Request(group=0, sample=sample, num_left=4.0, prefixes=()) for sample in range(3)])
    events.run(lambda: fleet.num_ended == 3)
    assert fleet.times() == EngineTime(active_s=4 + 8, filled_s=4 + 8, crowded_s=2 * 4, held_s=2 * 8)


def test_asynchronous_steps_take_as_long_as_the_slowest_of_the_three() -> None:
    config = simulation(
        run__steps=6,
        devices={"num": 3, "per_cell": 1},
        workload__prompts_per_step=2,
        workload__response={"median": 10, "sigma": 0, "max_tokens": 100},
        asynchronous__staleness=2,
    )
    # Answering takes 2 x 10 s, judging 2 x 4 s, training 20 tokens on one device 20 s.
    assert asynchronous(config, 1, 1).step_s == pytest.approx(20)
    fresh = config.model_copy(update={"asynchronous": config.asynchronous.model_copy(update={"staleness": 0})})
    assert asynchronous(fresh, 1, 1).step_s == pytest.approx(20 + 4 + 20)


# ---------------------------------------------------------------- what always holds


def short(seed: int) -> dict[str, Any]:
    """Return a random workload of three steps of 16 prompts."""
    return override(plain(seed), run__steps=3, workload__prompts_per_step=16)


def awake_twice(result: LayoutResult) -> bool:
    by_cell: dict[int, list[tuple[float, float]]] = {}
    for span in result.spans:
        if span.use in AWAKE:
            by_cell.setdefault(span.cell, []).append((span.start_s, span.end_s))
    return any(
        earlier[1] > later[0] + 1e-9
        for spans in by_cell.values()
        for earlier, later in zip(sorted(spans), sorted(spans)[1:])
    )


def test_no_layout_has_two_awake_roles_on_a_device_and_every_request_ends_once() -> None:
    """Test both rules, which the simulator asserts as well. `tail` and `replaces_groups` cause aborts and
    replacements."""
    for tail in ("drop", "restart", "continue"):
        config = parse_simulation(
            short(3) | {"sampling": {"replaces_groups": True, "over_dispatch": 1.5, "tail": tail}}
        )
        results = [full(config), partial_dynamic(config), partial_static(config, 2), external(config, 2, "x")]
        for result in [*results, asynchronous(config, 2, 1)]:
            assert not awake_twice(result)
            assert 0 < result.busy_frac <= 1
            assert all(step.num_groups == config.workload.prompts_per_step for step in result.steps)


def test_waking_a_role_beside_another_is_caught() -> None:
    cells = Cells(1)
    cells.put(0, Use.ROLLOUT, 0.0)
    with pytest.raises(AssertionError, match="rollout and genrm would both be awake on cell 0"):
        cells.put(0, Use.GENRM, 1.0)


def test_the_same_seed_gives_the_same_figures() -> None:
    config = parse_simulation(short(1))
    assert partial_dynamic(config) == partial_dynamic(config)


# ---------------------------------------------------------------- the bound


@pytest.mark.parametrize("verdict_tokens", [10, 40, 160])
def test_with_perfect_scaling_full_colocation_saves_the_bound_which_is_at_most_half(verdict_tokens: float) -> None:
    """Test with equal requests that divide evenly, no cost of switching and almost no training.

    With work of a (sampling) and b (judging) on n devices, in turns take (a + b) / n, and apart at the best split
    (sqrt(a) + sqrt(b))^2 / n.
    """
    config = simulation(
        devices={"num": 6, "per_cell": 1},
        workload__prompts_per_step=180,
        workload__response={"median": 40, "sigma": 0, "max_tokens": 1000},
        workload__verdict={"median": verdict_tokens, "sigma": 0, "max_tokens": 1000},
        training__flops_per_token=1e-6,
    )
    bound = 1 - (40 + verdict_tokens) / (math.sqrt(40) + math.sqrt(verdict_tokens)) ** 2
    saving = 1 - full(config).step_s / min(external(config, r, "x").step_s for r in range(1, 6))
    assert saving == pytest.approx(bound, abs=1e-3) and saving < 0.501


# ---------------------------------------------------------------- the policy


def test_on_the_workloads_of_its_tuning_the_dynamic_split_is_within_5_percent_of_the_best_static_one() -> None:
    """Test against the best static split, which is found by trying all. The policy was tuned on these 20 workloads."""
    ratios = {seed: measure("plain", seed)["ratio"] for seed in range(20)}
    assert max(ratios.values()) <= NEAR, ratios


@pytest.mark.parametrize("num", [4, pytest.param(20, marks=pytest.mark.parity)])
def test_on_workloads_that_it_was_not_tuned_on_the_dynamic_split_is_rarely_worse_than_that(num: int) -> None:
    ratios = sorted(measure("plain", seed)["ratio"] for seed in range(5000, 5000 + num))
    assert ratios[-1 - num // 10] <= NEAR and ratios[-1] <= 1.1, ratios


@pytest.mark.parity
def test_where_groups_are_replaced_rollout_is_not_given_more_because_it_waits_for_verdicts() -> None:
    """Test that rollout gets no more cells although its cells have a request or two most of the time, however many
    cells there are."""
    ratios = {seed: measure("replacing", seed)["ratio"] for seed in range(10)}
    assert mean(ratios.values()) <= 1.04 and max(ratios.values()) <= 1.15, ratios


def test_on_a_workload_that_drifts_the_dynamic_split_beats_every_static_one() -> None:
    config = load_simulation(CONFIGS / "drift.yaml")
    dynamic = partial_dynamic(config)
    static = [partial_static(config, r) for r in range(1, config.num_cells)]
    assert dynamic.step_s < min(result.step_s for result in static)
    assert dynamic.rollout_s < min(result.rollout_s for result in static)


# ---------------------------------------------------------------- parts and the command


def test_lengths_have_the_median_and_the_tail_that_were_asked_for() -> None:
    lengths = simulation(
        workload__response={"median": 200, "sigma": 0.5, "tail_frac": 0.1, "tail_alpha": 1.5, "max_tokens": 10**6},
        training__max_tokens_per_microbatch=10**7,
    ).workload.response
    draw = np.random.default_rng(0)
    tokens = draw_lengths(lengths, draw.standard_normal(40000), draw.standard_normal(40000))
    assert np.median(tokens) == pytest.approx(200, rel=0.02)
    start = np.quantile(tokens, 0.9)
    assert np.mean(tokens > 4 * start) == pytest.approx(0.1 * 4**-1.5, rel=0.15)


def test_a_search_with_few_tries_finds_the_valley() -> None:
    found = find_best(range(1000), lambda x: abs(x - 637), float, max_tries=24)
    assert abs(found.choice - 637) <= 5 and not found.is_exhaustive
    assert find_best(range(9), lambda x: abs(x - 6), float, max_tries=9).choice == 6


def test_a_wrong_key_and_an_impossible_shape_are_named() -> None:
    with pytest.raises(ConfigError, match=r"genrm.wake is not a known key; did you mean genrm.wake_s"):
        parse_simulation(tree(genrm__wake=1))
    with pytest.raises(ConfigError, match=r"workload.response.medain is not a known key; did you mean .*.median\?"):
        parse_simulation(tree(workload__response__medain=1))
    with pytest.raises(ConfigError, match=r"rollout.devices is 2; it must divide devices.per_cell, which is 1"):
        parse_simulation(tree(rollout=engine(decode_fixed_s=1.0, devices=2)))


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("rollout.decode_per_sequence_s", -0.01, "at least 0"),
        ("rollout.decode_fixed_s", math.nan, "a finite number"),
        ("rollout.wake_s", -5, "at least 0"),
        ("rollout.wake_s", math.inf, "a finite number"),
        ("rollout.wake_s", True, "a number"),
        ("rollout.kv_tokens", 0, "at least 1"),
        ("publish_s", -1, "at least 0"),
        ("publish_s", "soon", "a number"),
        ("handover_s", 1e300, "at most 1"),
        ("training.mfu", 0, "at least 1e-06"),
        ("training.mfu", 1.5, "at most 1"),
        ("training.peak_flops", 0, "at least 1e-06"),
        ("training.scaling_exponent", math.inf, "a finite number"),
        ("workload.response.median", 0, "at least 1"),
        ("workload.response.sigma", -1, "at least 0"),
        ("workload.response.tail_frac", 2, "at most 1"),
        ("workload.response.tail_alpha", 0, "at least 1e-06"),
        ("workload.verdict.prompt_correlation", 2, "at most 1"),
        ("workload.signal_frac", 2, "at most 1"),
        ("workload.drift", 0, "at least 1e-06"),
        ("external.paper_genrm_frac", math.nan, "a finite number"),
        ("sampling.over_dispatch", math.inf, "a finite number"),
        ("sampling.max_prompts_factor", math.nan, "a finite number"),
        ("placement.min_gain_frac", math.nan, "a finite number"),
        ("placement.decide_every_s", 0, "at least 1e-06"),
        ("devices.num", 10**9, "at most 1000000"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_what_is_wanted(key: str, value: object, wanted: str) -> None:
    given = [value] if "placement" in key or "sampling" in key else [value, {"value": value, "source": "assumed"}]
    for written in given[: 1 if value is True or key == "devices.num" else 2]:
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)} is .+: wanted {re.escape(wanted)}"):
            parse_simulation(tree(**{key.replace(".", "__"): written}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__wake_s": 1e18}, "the simulated time passes 1e+09 s"),
        ({"placement__decide_every_s": 1e-5}, "placement.decide_every_s is 1e-05; a generation phase has more than"),
    ],
)
def test_a_simulation_without_an_end_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("yatt_mm.simulator.cell_movers.MAX_DECISIONS", 1000)
    with pytest.raises(ConfigError, match=re.escape(message)):
        partial_dynamic(simulation(**changes))


def test_requests_end_however_late_the_clock_is() -> None:
    """Test at a clock of 10^8 s, which cannot tell times apart that are closer than 10^-8 s."""
    speed = engine(decode_fixed_s=1e-6, wake_s=1e8)
    assert 0 < full(simulation(rollout=speed)).rollout_s == pytest.approx(2e-5 + 8, rel=1e-3)


def test_the_command_prints_the_seven_layouts_as_json_and_draws_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(tree(devices={"num": 4, "per_cell": 1})))
    assert main([str(file), "--json", "run.steps=2"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert tuple(layout["name"] for layout in layouts) == NAMES
    assert all({"step_s", "rollout_s", "busy_frac"} <= set(layout) for layout in layouts)
    assert main([str(file), "genrm.wake=1"]) == 2
    assert main([str(file), "--gantt", str(tmp_path / "picture.png")]) == 0
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def layout(name: str, step_s: float) -> LayoutResult:
    times = StepTimes(step_s=step_s, rollout_s=1, train_s=1, num_prompts_used=1, num_groups=1, imbalance=1)
    return LayoutResult(name=name, split="", steps=(times,), busy_frac=1, num_moves=0, decisions=(), spans=())


def test_a_sentence_says_which_layout_is_best_and_what_an_older_policy_would_buy() -> None:
    slow, fast, older = layout("full", 20.0), layout("partial_dynamic", 15.0), layout("async", 12.0)
    said = conclusion([slow, fast, older])
    assert said.startswith(
        "partial_dynamic has the shortest steps of the layouts that train on responses of the present"
    )
    assert said.endswith(": 15.0 s, 25.0% less than full; async takes 12.0 s, on responses of an older policy")
    assert conclusion([fast, layout("async", 16.0)]).endswith("policy: 15.0 s")


def test_the_command_takes_several_configs_a_table_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("a.yaml", "b.yaml")]
    for file in files:
        Path(file).write_text(yaml.safe_dump(tree()))
    assert main([files[0], "run.steps=2", files[1]]) == 0
    out = capsys.readouterr().out
    assert out.count("2 steps") == out.count("assumed, not measured") == 2
    for arguments, message in (
        ([*files, "--json"], "--json takes one config, but 2 are given"),
        ([*files, "--gantt", "x.png"], "--gantt takes one config, but 2 are given"),
        (["run.steps=2"], "no config is given"),
        ([files[0], "no.yaml"], "cannot read the config no.yaml: No such file or directory"),
        ([str(tmp_path)], f"cannot read the config {tmp_path}: Is a directory"),
        ([*files, "publish_s=-1"], f"{files[0]}: publish_s is -1: wanted at least 0"),
        ([files[0], "=1"], "wanted dotted.key=value, such as run.seed=1"),
    ):
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and message in told and told.count("\n") == 1


@pytest.mark.parametrize("name", ["yatt_paper", "drift", "scale_4096"])
def test_the_configs_that_come_with_it_name_a_source_for_every_number(name: str) -> None:
    config = load_simulation(CONFIGS / f"{name}.yaml")
    assert "given without a source" not in str(config.model_dump())
