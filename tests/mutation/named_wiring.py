"""Changes of the lines that bring a setting to where it counts, each with the test that turns red by it. `named.py` has
the others."""

from __future__ import annotations

from tests.mutation.named import FAULTS, Named

MAKERS = "tests/yatt_mm/runtime/test_makers.py::"
RANK = "tests/yatt_mm/training/test_stale_tokens.py::"

NAMED_WIRING = (
    Named(
        claim="an engine has the dtype of the config",
        test=f"{MAKERS}test_the_settings_of_an_engine_are_those_of_its_spec",
        path="yatt_mm/rollout/engine_types.py",
        before="            dtype=spec.dtype,\n",
        after="",
    ),
    Named(
        claim="ranks train the adapters of the config",
        test=f"{MAKERS}test_ranks_get_adapters_and_a_critic",
        path="yatt_mm/runtime/makers.py",
        before="        lora=train.lora.settings(),\n",
        after="",
    ),
    Named(
        claim="a rank trains with the loss of its algorithm",
        test=f"{RANK}test_a_rank_trains_with_the_surrogate_clips_and_entropy_bonus_of_its_settings",
        path="yatt_mm/training/worker.py",
        before="surrogate=algorithm.surrogate",
        after='surrogate=ALGORITHMS["grpo"].surrogate',
    ),
    Named(
        claim="a share of the optimizer state is on the host",
        test="tests/yatt_mm/training/test_offload.py::"
        "test_a_checkpoint_with_optimizer_state_on_the_host_continues_with_the_same_bits[0.5]",
        path="yatt_mm/training/optimizer.py",
        before="optimizer_cpu_offload=settings.offload_frac > 0",
        after="optimizer_cpu_offload=False",
    ),
    Named(
        claim="the next step samples while a checkpoint is written",
        test=f"{FAULTS}test_controllers_and_ranks_that_die_cost_time_only",
        path="yatt_mm/control/controller.py",
        before="if self.step == self.config.train.steps or not self.config.checkpoint.asynchronous:",
        after="if True:",
    ),
    Named(
        claim="a node places its memory as it is told",
        test="tests/dataplane/storage/test_arena.py::test_a_node_places_its_memory_as_it_is_told_and_says_so",
        path="dataplane/cli/serve.py",
        before="        numa=args.numa,\n",
        after="",
    ),
    Named(
        claim="a controller looks at itself at the end",
        test="tests/yatt_mm/control/test_actor.py::test_a_controller_looks_at_itself_when_it_has_ended",
        path="yatt_mm/control/actor.py",
        before="        _check_nothing_heavy_was_held()\n",
        after="",
    ),
    Named(
        claim="a time that is too short for a step is an error",
        test="tests/yatt_mm/runtime/test_stopping.py::"
        "test_a_time_in_which_no_step_ends_is_an_error_because_to_start_again_would_not_help",
        path="yatt_mm/runtime/stopping.py",
        before="        if self.is_by_time and not has_moved:\n",
        after="        if self.is_by_time and has_moved:\n",
    ),
    Named(
        claim="reward workers get the weights of the parts",
        test="tests/yatt_mm/runtime/test_makers.py::test_reward_workers_get_every_setting_of_rewards",
        path="yatt_mm/runtime/makers.py",
        before="weights=config.reward.part_weights",
        after="weights={}",
    ),
    Named(
        claim="parts count by weight and within their ranges",
        test="tests/yatt_mm/rewards/test_parts.py::test_a_call_bounds_and_weighs_the_parts_that_the_function_returns",
        path="yatt_mm/rewards/call.py",
        before="read_reward(given, self._weights, self._ranges)",
        after="read_reward(given, {})",
    ),
    Named(
        claim="an evaluation measures the part accuracy",
        test="tests/yatt_mm/control/test_evaluation.py::"
        "test_accuracy_is_measured_by_its_part_and_other_parts_have_their_means",
        path="yatt_mm/control/evaluation.py",
        before="    if parts is None:\n        return group.rewards\n",
        after="    return group.rewards\n",
    ),
    Named(
        claim="an algorithm has its own clips",
        test="tests/yatt_mm/config/test_algorithm_section.py",
        path="yatt_mm/algorithms/table.py",
        before='reads=STD | CLIP | {"clip_low": 3e-4, "clip_high": 4e-4}',
        after="reads=STD | CLIP",
    ),
    Named(
        claim="begun steps are sampled again after a change of what they depend on",
        test="tests/yatt_mm/runtime/test_begun_start.py::"
        "test_they_are_sampled_again_if_what_they_depend_on_has_changed",
        path="yatt_mm/runtime/begun_start.py",
        before='"reward.num_workers"',
        after='"reward"',
    ),
    Named(
        claim="a name of the hub has a revision with a slash",
        test="tests/yatt_mm/preflight/test_hub.py::test_a_name_of_the_hub_is_told_from_a_path",
        path="yatt_mm/preflight/hub.py",
        before=r"(@(?P<revision>[\w./-]+))?",
        after=r"(@(?P<revision>[\w.-]+))?",
    ),
    Named(
        claim="a look at a set draws samples at random",
        test="tests/yatt_mm/survey/test_look.py::"
        "test_what_is_not_seen_whole_is_drawn_at_random_and_alike_with_the_same_seed",
        path="yatt_mm/survey/survey.py",
        before="index=permuted(place, num_samples, seed, 0, name)",
        after="index=place",
    ),
    Named(
        claim="old tokens are counted",
        test="tests/yatt_mm/generation/test_metrics.py::"
        "test_the_oldest_tokens_and_the_responses_that_were_cut_off_are_counted_over_all_controllers",
        path="yatt_mm/generation/metrics.py",
        before="step - 1 - min(low for low, _ in group.group.policy_versions)",
        after="0",
    ),
)
