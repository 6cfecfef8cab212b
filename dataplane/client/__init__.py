"""The client side of the data plane: store, make and read objects at a node, or run a node as a child process.

`client.py` has `Client` for refs, samples, scopes and puts; `reader.py` has `Reader`, which resolves refs into views of
shared memory; `writer.py` has `Writer`, which makes arrays in shared memory; `embedded.py` has `EmbeddedNode`.
`connect.py` opens connections and reads credentials, `retry.py` repeats calls to a node that went away, and
`torch_view.py` turns views into torch tensors. The other files are their parts: `node_session.py` (what shows a node
that this process is alive, and what it keeps for it), `session_stream.py`, `current_session.py`, `lease_session.py`
(leases of a reader), `download.py` and `object_downloader.py` (copies over Flight), `inplace_put.py` and
`inplace_stream.py` (writes into the arena), `put_batches.py`, `scope_heartbeat.py` and `node_process.py`.

May import: core.
"""
