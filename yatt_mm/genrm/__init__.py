"""Judges: reward models that read prompt, media and response, and give a verdict on how good the response is.

`judge.py` asks a model that runs in an engine of the run, through `actor.py`, its Ray actor. `remote.py` asks a server
over HTTP, through `remote_actor.py`; both actors have the same methods. `chat_client.py` is one request to a server,
`chat_form.py` the form of questions and replies, and `server_waits.py` the waits while the server is away. `traffic.py`
counts the bytes that an actor moved over TCP. Both kinds of judges build the prompt from the text of
`yatt_mm.protocol.judge_template`, and `yatt_mm.protocol.verdicts` turns the verdict into a score.

May import: common, dataplane.client, dataplane.core, models.recipes, protocol, rollout.
"""
