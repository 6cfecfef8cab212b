"""The store of a node: the arena in shared memory, objects, leases, scopes, eviction, and the disk.

`store.py` is the entry. `arena.py` is the shared-memory segment, `allocator.py` and `allocation.py` find room in it.
`leases.py` keeps the table of leases and ends them, `object_table.py` the objects and their order of eviction
(`eviction.py` chooses), `scopes.py` the scopes. Spilling and durable objects are in `disk_tier.py` and `disk_files.py`.

May import: core.
"""
