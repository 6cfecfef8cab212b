"""The store of a node: the arena in shared memory, objects, leases, scopes, eviction, and the disk.

`store.py` is the entry. `arena.py` is the shared memory, `allocator.py` finds room in it. `allocation.py` starts
evictions when the arena is full, and waits for room (`turns.py`); `eviction.py` chooses the objects: one that can be
made again is dropped, one that must be kept is first spilled to disk. `leases.py` keeps the table of leases and ends
them, `object_table.py` the objects and their order of eviction, `scopes.py` the scopes. `presence_file.py` shows which
clients are alive. Spilled and durable objects are in `disk_tier.py` and `disk_files.py`.

May import: core.
"""
