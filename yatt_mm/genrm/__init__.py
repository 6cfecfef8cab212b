"""Judges: reward models that read prompt, media and response, and give a verdict on how good the response is.

`judge.py` asks a model that runs in an engine of the run, through `actor.py`, its Ray actor. `remote.py` asks a server
over HTTP, through `remote_actor.py`; both actors have the same methods. `traffic.py` counts the bytes that an actor
moved over TCP. What a judge is asked and how its verdict is read is in `yatt_mm.protocol`.

May import: common, dataplane.client, dataplane.core, models.recipes, protocol, rollout.
"""
