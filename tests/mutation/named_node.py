"""Changes of the data-plane node and of what its clients read, each with the test that turns red by it. `named.py` has
the others."""

from __future__ import annotations

from tests.mutation.named import Named

LIMITS = "tests/dataplane/server/test_call_limits.py::"
PEERS = "tests/dataplane/cluster/test_peers.py::"
TIER = "tests/dataplane/storage/test_disk_tier.py::"
VIEWS = "tests/dataplane/client/test_torch_view.py::"

NAMED_NODE = (
    Named(
        claim="each verb needs the right that the docs name",
        test="tests/dataplane/server/test_tokens.py::test_the_rights_of_the_verbs_are_those_of_the_docs",
        path="dataplane/server/actions.py",
        before="scope_actions.close_scope, Right.WRITE",
        after="scope_actions.close_scope, Right.READ",
    ),
    Named(
        claim="requests of all callers share a budget",
        test=f"{LIMITS}test_the_requests_of_all_callers_of_a_node_are_in_that_budget",
        path="dataplane/server/flight_server.py",
        before="            with BODIES.held(action.body.size):\n",
        after="            if True:\n",
    ),
    Named(
        claim="streams are in that budget too",
        test=f"{LIMITS}test_the_requests_of_all_callers_of_a_node_are_in_that_budget",
        path="dataplane/server/request_stream.py",
        before="        BODIES.take(nbytes)\n        self._held_bytes = nbytes\n",
        after="",
    ),
    Named(
        claim="what was derived into an open scope is not evicted",
        test="tests/dataplane/storage/test_scopes.py::test_derived_objects_of_an_open_scope_are_not_evicted",
        path="dataplane/server/actions.py",
        before="scope_actions.put_made_into_scope(",
        after="(lambda *_, **__: None)(",
    ),
    Named(
        claim="a big object comes over every connection",
        test=f"{PEERS}test_a_big_object_comes_in_ranges_over_as_many_connections_as_its_node_may_open",
        path="dataplane/cluster/fetcher.py",
        before="receive_ranges(flights, refs[0]",
        after="receive_ranges(flights[:1], refs[0]",
    ),
    Named(
        claim="a file that cannot be committed leaves no mark",
        test=f"{TIER}test_a_file_that_cannot_be_committed_is_removed_with_its_mark",
        path="dataplane/storage/disk_files.py",
        before="            self.discard(replace(file, path=path), scope)\n            if",
        after="            if",
    ),
    Named(
        claim="concurrent durable puts share syncs",
        test="tests/dataplane/storage/test_disk_files.py::test_concurrent_durable_puts_share_syncs_and_all_of_them_are_there",
        path="dataplane/storage/disk_files.py",
        before="self._commits.commit(temporary",
        after="GroupCommit().commit(temporary",
    ),
    Named(
        claim="prefetching takes no more than its window",
        test="tests/dataplane/derive/test_prefetch.py::test_no_more_is_taken_than_the_window_holds",
        path="dataplane/derive/deriver.py",
        before="            if self._pool.queue.num_ahead >= WINDOW:\n                return False\n",
        after="",
    ),
    Named(
        claim="a reader's memory is registered with CUDA read-only",
        test=f"{VIEWS}test_the_memory_of_a_reader_is_registered_once_read_only_until_the_end",
        path="dataplane/client/torch_view.py",
        before="_REGISTER_PORTABLE | _REGISTER_READ_ONLY",
        after="_REGISTER_PORTABLE",
    ),
)
