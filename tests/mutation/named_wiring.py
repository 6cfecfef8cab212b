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
)
