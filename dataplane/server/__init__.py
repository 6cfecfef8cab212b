"""The node: the Flight server, its handlers, access control, limits and metrics, and putting all parts together.

`node.py` makes the `Services` (`services.py`) and starts the servers. `flight_server.py` has the Flight verbs; each
handler has a module: `do_get.py`, `do_put.py`, `do_exchange.py` (sessions, resolve), `do_exchange_put.py` (put in
place), `sessions.py` (what clients keep, and when that ends), `actions.py`, `flight_info.py`. `auth.py` checks tokens
and TLS, `config.py` the configuration. Publishing a written object is in `publish.py`, leases for DoGet in
`leasing.py`, scopes and their clients in `scope_owners.py`.

May import: client, cluster, core, datasets, datasets.parsing, derive, media, storage.
"""
