"""Changes of what protects a run in trouble, each with the test that turns red by it: checkpoints, stops, skipped
updates, judges elsewhere, processes that stand still, other users. `named.py` has the others."""

from __future__ import annotations

from tests.mutation.named import Named

CHECKPOINTS = "tests/yatt_mm/common/test_checkpoints.py::"
MANIFEST = "tests/yatt_mm/common/test_manifest.py::"
PARTS = "tests/yatt_mm/training/test_part_files.py::"
SKIPPED = "tests/yatt_mm/control/test_skipped_steps.py::"
STOPPING = "tests/yatt_mm/runtime/test_stopping.py::"
WAITS = "tests/yatt_mm/genrm/test_server_waits.py::"
WATCH = "tests/yatt_mm/control/test_failure_watch.py::"
STANDING = "tests/dataplane/client/test_standing_still.py::"
PRESENCE = "tests/dataplane/client/test_presence.py::"
KEYS = "tests/yatt_mm/runtime/test_judge_keys.py::"

NAMED_TROUBLE = (
    Named(
        claim="a checkpoint loses its name before its files",
        test=f"{CHECKPOINTS}test_a_checkpoint_loses_its_name_before_its_files",
        path="yatt_mm/common/dropping.py",
        before="    folder.rename(dropped)\n",
        after="    shutil.copytree(folder, dropped)\n    shutil.rmtree(folder)\n",
    ),
    Named(
        claim="the best checkpoint stays",
        test=f"{CHECKPOINTS}test_the_best_one_stays_until_another_is_better",
        path="yatt_mm/common/checkpoints.py",
        before="            if old != best:\n",
        after="            if old:\n",
    ),
    Named(
        claim="the checkpoint before a damaged one is used",
        test=f"{CHECKPOINTS}test_the_checkpoint_before_a_damaged_one_is_used_and_this_is_said",
        path="yatt_mm/common/checkpoints.py",
        before="        for step in reversed(steps):\n",
        after="        for step in steps[-1:]:\n",
    ),
    Named(
        claim="a file with one other bit is noticed",
        test=f"{MANIFEST}test_a_file_that_is_cut_short_gone_or_has_one_other_bit_is_named",
        path="yatt_mm/common/manifest.py",
        before="        if _read(path) != wanted:\n",
        after="        if _read(path).nbytes != wanted.nbytes:\n",
    ),
    Named(
        claim="a manifest with another bit is noticed",
        test=f"{MANIFEST}test_no_byte_of_a_manifest_can_change_without_being_noticed",
        path="yatt_mm/common/manifest.py",
        before="    if text != _text(files, version):\n",
        after="    if not text:\n",
    ),
    Named(
        claim="a file that was recorded and is gone is noticed",
        test=f"{MANIFEST}test_files_that_were_recorded_are_not_read_again_and_must_be_there",
        path="yatt_mm/common/manifest.py",
        before="    for name in recorded.keys() - files.keys():\n",
        after="    for name in ():\n",
    ),
    Named(
        claim="the boxes of a stretch are its elements",
        test="tests/yatt_mm/training/test_boxes.py",
        path="yatt_mm/training/boxes.py",
        before="whole_start, whole_stop = -(-start // per_row), stop // per_row",
        after="whole_start, whole_stop = -(-start // per_row), -(-stop // per_row)",
    ),
    Named(
        claim="what was not saved is not counted as filled",
        test=f"{PARTS}test_what_was_not_saved_is_not_filled",
        path="yatt_mm/training/part_files.py",
        before="                num_filled += common.numel\n",
        after="                num_filled += box.numel\n",
    ),
    Named(
        claim="a missing file of a rank is named",
        test=f"{PARTS}test_a_missing_or_damaged_file_is_named",
        path="yatt_mm/training/part_files.py",
        before="        for name in sorted(wanted ^ found):\n",
        after="        for name in sorted(found - wanted):\n",
    ),
    Named(
        claim="a checkpoint continues in any layout",
        test="tests/yatt_mm/training/test_rank_checkpoint.py::test_a_checkpoint_continues_in_any_layout_however_it_was_written",
        path="yatt_mm/training/rank_checkpoint.py",
        before="start=part.data.storage_offset() - entry.data.storage_offset()",
        after="start=0",
    ),
    Named(
        claim="a checkpoint counts when every rank has written its part",
        test="tests/yatt_mm/training/test_killed_save.py",
        path="yatt_mm/control/commit.py",
        before="num_written(self._step) < self._num_ranks",
        after="num_written(self._step) < 1",
    ),
    Named(
        claim="a loss of power takes no committed checkpoint",
        test="tests/yatt_mm/training/test_power_loss.py",
        path="yatt_mm/training/part_files.py",
        before="    sync_file(path)\n    return",
        after="    return",
    ),
    Named(
        claim="a second signal interrupts",
        test=f"{STOPPING}test_the_first_signal_asks_for_a_stop_and_the_second_one_interrupts",
        path="yatt_mm/runtime/stopping.py",
        before="            elif time.monotonic() - told_s > ONE_SIGNAL_S:\n",
        after="            elif not told_s:\n",
    ),
    Named(
        claim="status 75 says that nothing is lost",
        test=f"{STOPPING}test_the_status_says_whether_to_start_again",
        path="yatt_mm/runtime/command_line.py",
        before="SAVED_AND_STOPPED if loses_nothing and not interrupted_by_people() else INTERRUPTED",
        after="SAVED_AND_STOPPED if not interrupted_by_people() else INTERRUPTED",
    ),
    Named(
        claim="a run stops before its time is over",
        test=f"{STOPPING}test_a_run_stops_so_early_that_what_has_to_be_finished_fits_into_its_time",
        path="yatt_mm/runtime/stopping.py",
        before="ENDING_S + 2 * self._longest_s",
        after="ENDING_S",
    ),
    Named(
        claim="an update that is not finite on one rank is skipped on all",
        test="tests/yatt_mm/training/test_megatron_engine.py::"
        "test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all_and_changes_nothing",
        path="yatt_mm/training/megatron_engine.py",
        before="dist.all_reduce(flag, op=dist.ReduceOp.MIN)",
        after="dist.all_reduce(flag, op=dist.ReduceOp.MAX)",
    ),
    Named(
        claim="one good step between skipped ones begins the count anew",
        test=f"{SKIPPED}test_too_many_in_a_row_end_the_run_and_one_good_step_between_them_does_not",
        path="yatt_mm/control/skipped_steps.py",
        before="            self._num_in_a_row = 0\n            return",
        after="            return",
    ),
    Named(
        claim="a reward out of its range is noticed by all controllers",
        test=f"{SKIPPED}test_a_reward_out_of_its_range_is_noticed_by_all_controllers",
        path="yatt_mm/control/skipped_steps.py",
        before="        return any(self._rendezvous.gather(is_wrong))",
        after="        self._rendezvous.gather(is_wrong)\n        return is_wrong",
    ),
    Named(
        claim="a server that goes down in a step loses no verdict",
        test="tests/yatt_mm/genrm/test_judge_outages.py::"
        "test_a_server_that_goes_down_in_the_middle_of_a_step_loses_no_verdict",
        path="yatt_mm/genrm/server_waits.py",
        before="            if left_s <= 0:\n",
        after="            if num_failed > 1:\n",
    ),
    Named(
        claim="the wait for a server has an end",
        test=f"{WAITS}test_the_wait_ends_with_the_longest_outage_however_long_the_server_asks_for",
        path="yatt_mm/genrm/server_waits.py",
        before="            wait_s = min(max(pause_s(num_failed), away.retry_after_s), left_s)\n",
        after="            wait_s = max(pause_s(num_failed), away.retry_after_s)\n",
    ),
    Named(
        claim="waits for a server differ",
        test=f"{WAITS}test_waits_grow_and_differ",
        path="yatt_mm/genrm/server_waits.py",
        before="longest_s * random.uniform(0.5, 1.0)",
        after="longest_s * 0.75",
    ),
    Named(
        claim="one question without a reply is given up while others get theirs",
        test=f"{WAITS}test_one_question_to_which_alone_there_is_no_reply_is_given_up",
        path="yatt_mm/genrm/server_waits.py",
        before="            if num_own >= self._max_attempts:\n",
        after="            if num_own > 1000 * self._max_attempts:\n",
    ),
    Named(
        claim="too many missing verdicts of a judge end the run",
        test=f"{WATCH}test_too_many_failures_of_one_judge_end_the_run",
        path="yatt_mm/control/failure_watch.py",
        before="        return num_failed > self._section.max_failed_frac * num_responses",
        after="        return num_failed > num_responses",
    ),
    Named(
        claim="a leased view never changes while its process stands still",
        test=f"{STANDING}test_a_reader_that_stood_still_finds_its_views_as_they_were",
        path="dataplane/server/sessions.py",
        before="            if not is_final and (session.num_streams or session.is_present):\n",
        after="            if not is_final and session.num_streams:\n",
    ),
    Named(
        claim="a writer that stood still writes into no other object",
        test=f"{STANDING}test_a_writer_that_stood_still_writes_into_no_other_object",
        path="dataplane/server/sessions.py",
        before="                session.broken.add(stream)\n                return\n",
        after="                session.broken.add(stream)\n",
    ),
    Named(
        claim="memory of a killed client that stood still is free at once",
        test=f"{STANDING}test_a_client_that_stands_still_is_named_and_its_death_frees_its_memory",
        path="dataplane/server/sessions.py",
        before="                    if self._holder(session) is None:\n",
        after="                    if self._holder(session) == -1:\n",
    ),
    Named(
        claim="a forked child sees no recycled memory",
        test=f"{PRESENCE}test_a_child_that_touches_what_its_parent_mapped_is_ended_by_the_system",
        path="dataplane/core/arena_mapping.py",
        before="mapping.nbytes, mmap.MADV_DONTFORK)",
        after="mapping.nbytes, mmap.MADV_NORMAL)",
    ),
    Named(
        claim="a lost session's memory cannot be touched",
        test=f"{PRESENCE}test_a_process_whose_session_the_node_ended_cannot_touch_its_memory",
        path="dataplane/core/arena_mapping.py",
        before="    cover_memory(mapping.address, mapping.nbytes, replaces=True)",
        after="    mapping.address",
    ),
    Named(
        claim="a lease ends although its reader's token was changed",
        test=f"{PRESENCE}test_a_lease_ends_although_its_readers_token_was_changed",
        path="dataplane/server/sessions.py",
        before="            self._store.end_leases(leases, session.token)\n        for stream",
        after="            pass\n        for stream",
    ),
    Named(
        claim="no room: clients that stand still are named",
        test=f"{STANDING}test_a_client_that_stands_still_is_named_and_its_death_frees_its_memory",
        path="dataplane/storage/allocation.py",
        before='                raise OutOfSpaceError(f"{error}; {keepers}") from None\n',
        after="                raise\n",
    ),
    Named(
        claim="an allocation that is never served holds the others back ever less",
        test="tests/dataplane/storage/test_turns.py",
        path="dataplane/storage/turns.py",
        before="            held.pause_s *= 2\n",
        after="",
    ),
    Named(
        claim="no process of a run inherits a judge's key",
        test=f"{KEYS}test_ray_and_its_actors_do_not_inherit_the_keys_of_judges_and_listen_on_loopback_alone",
        path="yatt_mm/runtime/judge_keys.py",
        before="os.environ.pop(variable)",
        after="os.environ[variable]",
    ),
    Named(
        claim="a run's Ray listens on loopback alone",
        test=f"{KEYS}test_ray_and_its_actors_do_not_inherit_the_keys_of_judges_and_listen_on_loopback_alone",
        path="yatt_mm/runtime/cluster.py",
        before='(ray_constants, "ENABLE_RAY_CLUSTER", False)',
        after='(ray_constants, "ENABLE_RAY_CLUSTER", True)',
    ),
    Named(
        claim="the agent of a run's Ray listens nowhere",
        test=f"{KEYS}test_ray_and_its_actors_do_not_inherit_the_keys_of_judges_and_listen_on_loopback_alone",
        path="yatt_mm/runtime/cluster.py",
        before="is_agent = component == ray_constants.PROCESS_TYPE_DASHBOARD_AGENT",
        after="is_agent = False",
    ),
    Named(
        claim="another user can enter no folder of a run",
        test="tests/yatt_mm/whole_runs/test_doors.py::test_another_user_of_the_machine_can_read_call_and_fill_nothing",
        path="yatt_mm/common/owned_dirs.py",
        before="    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))\n",
        after="    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))\n    folder.chmod(0o755)\n",
    ),
    Named(
        claim="a launcher without its supervisor is told to stop",
        test="tests/yatt_mm/runtime/test_supervisor.py::test_a_launcher_whose_supervisor_is_killed_is_told_to_stop",
        path="yatt_mm/runtime/supervised.py",
        before="signal_on_parent_death(signal.SIGTERM)",
        after="signal_on_parent_death(signal.SIGKILL)",
    ),
    Named(
        claim="a controller without a sign of life ends a stream",
        test="tests/yatt_mm/batching/test_streams.py::"
        "test_a_controller_without_a_sign_of_life_ends_the_stream_and_one_with_signs_is_waited_for",
        path="yatt_mm/batching/rendezvous.py",
        before="if late and self._batches.outcome is None and controller not in late:",
        after="if False:",
    ),
    Named(
        claim="groups of a begun step count before a controller goes on",
        test="tests/yatt_mm/control/test_begun_step.py::test_the_groups_count_before_a_controller_goes_on",
        path="yatt_mm/control/begun_step.py",
        before="        self._rendezvous.gather(None)\n        if self._controller == 0:\n",
        after="        [self._rendezvous.gather(None) for _ in range(2)]\n        if self._controller == 0:\n",
    ),
    Named(
        claim="a reward worker that hangs is started again",
        test="tests/yatt_mm/generation/test_reward_stage.py::"
        "test_a_reward_worker_that_hangs_is_started_again_and_its_groups_are_scored_by_another",
        path="yatt_mm/generation/reward_stage.py",
        before="        context.calls.on_late = self._restart_late\n",
        after="",
    ),
    Named(
        claim="a judge's key stands in no error",
        test="tests/yatt_mm/genrm/test_chat_client.py::test_the_key_is_sent_and_stands_in_no_error",
        path="yatt_mm/genrm/chat_client.py",
        before="return (api_key, json.dumps(api_key)[1:-1])",
        after="return (api_key,)",
    ),
)
