"""Which prompts make up a step's batch, and where controllers meet to agree on it.

`rendezvous.py` is the actor in which controllers meet, and `rendezvous_client.py` is how they call it. It owns the
order of prompts (`prompt_order.py`) and the batch that is being filled (`step_batches.py`), by the rule of
`dynamic_sampling.py` (DAPO: groups without signal are replaced). `journal.py` has what controllers gave their training
ranks since the last checkpoint, for what comes after a fault.

May import: common, dataplane.core, dataplane.datasets, protocol.
"""
