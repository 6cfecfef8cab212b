"""The data plane: an Arrow Flight service that holds media, so that only the processes that compute on pixels see them.

`dataplane.client` talks to a node and maps nothing; `dataplane.reader` maps its shared memory; `dataplane.embedded`
starts a node as a child. `python -m dataplane --help` runs one by hand. This file imports nothing on purpose:
a controller pays only for what it names.
"""
