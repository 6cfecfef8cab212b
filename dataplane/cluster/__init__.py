"""Objects of other nodes: finding the home node of a ref and fetching its objects into this node's arena.

`peer_directory.py` gives the address of a node, and `fetcher.py` fetches each object once for all readers. Over Flight
the bytes come with `dataplane.client.download`, over byte connections (TCP next to Flight) with `byte_fetch.py`, and
one big object over several connections with `byte_fetch_ranges.py`.

May import: client, core, storage.
"""
