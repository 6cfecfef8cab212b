"""What a run has on each of its hosts: folders of its own, and a node of the data plane.

The launcher makes them on its own host (`own_host.py`: `scratch.py`, `run_node.py`). `devices.py` reserves devices on
all hosts, and `start_hosts.py` makes ready what the others need, once it has looked whether they have what every host
must have (`host_needs.py`). There `agent.py` is a Ray actor that starts a process (`host_process.py`), which keeps what
the launcher ordered (`orders.py`), and removes it also where Ray has killed the actor. `run_hosts.py` is all of them,
as the launcher sees them.

May import: common, config, dataplane.client, dataplane.core, dataplane.datasets, placement, preflight, protocol.
"""
