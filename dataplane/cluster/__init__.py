"""Objects of other nodes: finding the home node of a ref and fetching its objects into this node's arena.

`peer_directory.py` gives the address of a node, and `fetcher.py` fetches each object once for all readers. The bytes
come over Flight, with `dataplane.client.download`.

May import: client, core, storage.
"""
