"""Reward functions, and the worker processes that call them.

`functions.py` has those of the project (`answers.py`, `boxes.py`, `mathematics.py` read texts for them). `loading.py`
finds the configured one, `form.py` reads from its parameters what it takes, `response.py` and `medium.py` are what it
gets, and `reading.py` reads what it returns. `call.py` calls it with a time limit, in the processes of `worker.py`.

May import: algorithms, common, dataplane.client, dataplane.core, dataplane.media, protocol.
"""
