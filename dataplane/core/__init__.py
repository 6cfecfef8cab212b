"""The vocabulary that all parts of the data plane share: records, errors, and wire formats, without a node or a client.

`refs.py` has `Ref` and the other records that processes exchange, `digests.py` makes object names from content,
`integrity.py` checks refs against objects, and `errors.py` has the exception classes. Wire formats: `schemas.py`
(Arrow), `json_body.py` (JSON with checks), `locators.py` (replies to a resolve), `flight_errors.py` (errors).
`rights.py` and `token_file.py` say what a client may do. `shared_files.py` opens a node's shared memory,
`arena_mapping.py` maps its arena, `presence.py` shows that a client is alive, and `hosts.py` says which machine this
is. The other files are small helpers: units, timers, a cache, processes.

May import: nothing.
"""
