"""Changes of the product, each with the test that turns red by it. `python -m tests.mutation --named` tries them all.

They are here for tests that once asserted little: the change is what the test could not notice before.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One change, and the test that must fail with it."""

    claim: str
    """What the docs or the test's name promise."""
    test: str
    """The test, as pytest names it; it passes without the change."""
    path: str
    before: str
    """The text of the file that is replaced. It occurs once."""
    after: str


LEARNING = "tests/yatt_mm/whole_runs/test_learning.py::"
FAULTS = "tests/yatt_mm/whole_runs/test_faults.py::"
RESUMED = (
    "test_one_controller_resumes_it_on_a_node_of_ones_own_and_gets_the_numbers_of_the_run_without_a_break_until_ctrl_c"
)
MEDIA = "tests/yatt_mm/whole_runs/test_media.py::"
LOSSES = "tests/yatt_mm/algorithms/test_losses.py"
UPDATES = "tests/yatt_mm/rollout/test_engine_updates.py::"
METRICS = "tests/yatt_mm/generation/test_metrics.py::"
ENGINE = "tests/yatt_mm/training/test_megatron_engine.py::"
SIMULATOR = "tests/yatt_mm/simulator/test_simulator.py::"

NAMED = (
    Named(
        claim="a run learns",
        test=f"{LEARNING}test_the_model_learns_to_read_the_held_out_scans",
        path="yatt_mm/algorithms/losses.py",
        before="loss = -(weights * values).sum()",
        after="loss = (weights * values).sum()",
    ),
    Named(
        claim="the control learns nothing",
        test=f"{LEARNING}test_with_shuffled_answers_it_learns_nothing",
        path="yatt_mm/generation/prompts.py",
        before="self._by_set(slots, self._donors) if self._shuffle_answers else samples",
        after="samples",
    ),
    Named(
        claim="the sign of the reward decides what is learnt",
        test=f"{LEARNING}test_with_the_opposite_reward_it_forgets_and_begins_with_the_accuracy_of_the_exported_folder",
        path="yatt_mm/algorithms/advantages.py",
        before="    centred = [reward - mean for reward in rewards_G]",
        after="    centred = [abs(reward - mean) for reward in rewards_G]",
    ),
    Named(
        claim="the exported folder holds what was trained",
        test=f"{LEARNING}test_the_exported_folder_holds_what_was_trained_and_reads_as_well_in_transformers",
        path="yatt_mm/training/megatron_engine.py",
        before="self._files.write_like(directory, PROGRESS.ticking(self.weights), also=adapter)",
        after="self._files.write_like(directory, [(n, t * 1.0001 if t.dim() == 1 else t) for n, t in self.weights])",
    ),
    Named(
        claim="each row of a plan has its own advantage",
        test="tests/yatt_mm/control/test_balance.py",
        path="yatt_mm/training/step_plan.py",
        before="advantage=one.advantages[row]",
        after="advantage=one.advantages[-1 - row]",
    ),
    Named(
        claim="the upper clip has its own bound",
        test=LOSSES,
        path="yatt_mm/algorithms/losses.py",
        before="1 - settings.clip_low, 1 + settings.clip_high",
        after="1 - settings.clip_low, 1 + settings.clip_low",
    ),
    Named(
        claim="the entropy bonus rewards entropy",
        test=LOSSES,
        path="yatt_mm/algorithms/losses.py",
        before="- settings.entropy_coef * (weights * entropy).sum()",
        after="+ settings.entropy_coef * (weights * entropy).sum()",
    ),
    Named(
        claim="a run with images and videos trains on what was sampled",
        test=f"{MEDIA}test_a_run_on_images_and_videos_trains_on_every_sample_and_leaves_nothing_behind",
        path="yatt_mm/rollout/engine_media.py",
        before="        patches=view,",
        after="        patches=view[::-1].copy(),",
    ),
    Named(
        claim="the reference's weights give way to the policy's",
        test="tests/yatt_mm/training/test_reference.py",
        path="yatt_mm/training/offload.py",
        before="            self._from_host(Holding.WEIGHTS, storages)",
        after="            pass",
    ),
    Named(
        claim="the exported adapter on the base model is the merged model",
        test="tests/yatt_mm/training/lora/test_lora.py",
        path="models/lora/adapter.py",
        before="self.a.float(), alpha=self.scale)",
        after="self.a.float(), alpha=1.0)",
    ),
    Named(
        claim="with LoRA the reference is the base without adapters",
        test="tests/yatt_mm/training/lora/test_lora_training.py",
        path="yatt_mm/training/megatron_engine.py",
        before="without_adapters = self._adapters.off() if self._adapters else nullcontext()",
        after="without_adapters = nullcontext()",
    ),
    Named(
        claim="the policy becomes the reference when it is time",
        test=f"{MEDIA}test_the_policy_leaves_its_reference_until_it_takes_its_place",
        path="yatt_mm/common/reference_folders.py",
        before="        return self.folder(last) if last else self.first",
        after="        return self.first",
    ),
    Named(
        claim="no controller grows while media pass",
        test=f"{MEDIA}test_no_controller_grows_while_the_pixels_pass",
        path="yatt_mm/control/step_report.py",
        before="        return_freed_memory()\n",
        after='        return_freed_memory()\n        self._grown = [*getattr(self, "_grown", []), b"x" * (6 << 20)]\n',
    ),
    Named(
        claim="the memory of a controller is that of its process",
        test=f"{METRICS}test_the_resident_memory_is_what_the_system_counts_and_grows_with_what_is_written",
        path="yatt_mm/generation/metrics.py",
        before='    return pages * os.sysconf("SC_PAGE_SIZE")',
        after="    return 100 << 20",
    ),
    Named(
        claim="a sample is sampled with its own images and videos, in their order",
        test=f"{MEDIA}test_kept_rollouts_show_the_images_and_videos_of_their_samples",
        path="yatt_mm/generation/prompts.py",
        before="        media = tuple(media[place] for place in asked.order)\n",
        after="        media = tuple(media[place] for place in reversed(asked.order))\n",
    ),
    Named(
        claim="each kept response has its own advantage",
        test=f"{LEARNING}test_what_the_model_said_is_kept_as_it_was",
        path="yatt_mm/keeper/keeper.py",
        before='"advantage": kept.advantages[place] if',
        after='"advantage": kept.advantages[-1 - place] if',
    ),
    Named(
        claim="a checkpoint that is not asynchronous is committed in its step",
        test=f"{LEARNING}test_a_checkpoint_that_is_not_asynchronous_is_committed_in_its_step",
        path="yatt_mm/control/controller.py",
        before="        if self.step == self.config.train.steps or not self.config.checkpoint.asynchronous:\n",
        after="        if self.step == self.config.train.steps:\n",
    ),
    Named(
        claim="a rank in bfloat16 computes in it",
        test=f"{ENGINE}test_a_model_in_bfloat16_is_as_far_from_its_float32_as_bfloat16_rounds",
        path="yatt_mm/training/megatron_engine.py",
        before="            DTYPES[dtype],\n",
        after="            torch.float32,\n",
    ),
    Named(
        claim="a checkpoint that was not committed does not count",
        test=f"{FAULTS}test_a_rank_that_dies_too_often_is_named_and_the_checkpoint_does_not_count",
        path="yatt_mm/common/checkpoints.py",
        before='re.fullmatch(r"step_(\\d+)", path.name)',
        after='re.search(r"step_(\\d+)", path.name)',
    ),
    Named(
        claim="a run that one controller resumes has the numbers of two",
        test=f"{FAULTS}{RESUMED}",
        path="yatt_mm/batching/step_batches.py",
        before='"expected_signal_frac": self._expected_signal_frac',
        after='"expected_signal_frac": 1.0',
    ),
    Named(
        claim="engines open the device memory of their own GPU",
        test="tests/yatt_mm/rollout/test_device_weights.py",
        path="yatt_mm/protocol/published.py",
        before='        if segment["gpu"] == gpu:',
        after='        if segment["gpu"] != gpu:',
    ),
    Named(
        claim="an update wakes the weights of a sleeping engine alone",
        test=f"{UPDATES}test_an_update_of_a_sleeping_engine_wakes_its_weights_alone_and_they_can_sleep_again",
        path="yatt_mm/rollout/vllm_engine.py",
        before='            await self._llm.wake_up(tags=["weights"])',
        after="            await self._llm.wake_up()",
    ),
    Named(
        claim="tokens carry the version of the weights that sampled them",
        test=f"{UPDATES}test_tokens_sampled_across_an_update_carry_the_version_that_gave_them",
        path="yatt_mm/rollout/vllm_backend.py",
        before="int(span.version) for span in spans",
        after="int(spans[-1].version) for span in spans",
    ),
    Named(
        claim="the memory of a node is placed as asked",
        test="tests/dataplane/storage/test_arena.py",
        path="dataplane/storage/numa.py",
        before="ctypes.c_int(_MODES[self.mode])",
        after="ctypes.c_int(0)",
    ),
    Named(
        claim="a client that closes ends its scopes at once",
        test="tests/dataplane/storage/test_scopes.py::test_clients_that_close_with_an_open_scope_end_it_and_their_thread",
        path="dataplane/client/scope_heartbeat.py",
        before='                stream[0].write_metadata(pa.py_buffer(dump({"end": True})))',
        after="                pass",
    ),
    Named(
        claim="a ref of another node is not made a second time by its own",
        test="tests/dataplane/derive/test_deriver.py::test_a_ref_of_one_node_is_made_again_by_another",
        path="dataplane/derive/materializer.py",
        before="self._num_recomputed += before is not None",
        after="self._num_recomputed += 1",
    ),
    Named(
        claim="full colocation saves what the bound allows",
        test=f"{SIMULATOR}test_with_perfect_scaling_full_colocation_saves_the_bound_which_is_at_most_half",
        path="yatt_mm/simulator/cell_movers.py",
        before="            for cell in rollout.cells:\n                self._hands.move(cell, Use.GENRM)",
        after="            for cell in list(rollout.cells)[1:]:\n                self._hands.move(cell, Use.GENRM)",
    ),
    Named(
        claim="the moving split is near the best fixed one, also on workloads that it was not tuned on",
        test=f"{SIMULATOR}test_on_workloads_that_it_was_not_tuned_on_the_dynamic_split_is_rarely_worse_than_that",
        path="yatt_mm/placement/policy.py",
        before="wanted_s = bounds.min_gain_frac * now_s",
        after="wanted_s = now_s",
    ),
    Named(
        claim="packages for CUDA are hidden beside a torch for CPUs alone",
        test="tests/models/compat/test_compat.py::test_packages_for_cuda_are_hidden_and_repaired_beside_a_torch_for_cpus_alone",
        path="models/compat/cuda_builds.py",
        before="    if not torch_is_cpu_only():\n        return\n",
        after="",
    ),
)
