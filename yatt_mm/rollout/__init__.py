"""The policy in vLLM: samples responses to prompts, and takes new weights while it runs.

`worker.py` turns prompts with refs into stored groups, and `actor.py` is its Ray actor. `vllm_engine.py` is one engine:
requests, sleep, weight updates, deadlines. `engine_types.py` holds the engine's requests and results, and
`engine_inputs.py`, `engine_media.py` and `prompt_template.py` make them from refs and questions. `continuation.py`
joins what several attempts sampled for one group. `engine_process.py`, `vllm_backend.py` and `vllm_environment.py`
start vLLM; `core_main.py`, `plugin.py` and `weight_transfer.py` run inside vLLM's processes. The judges' engines
(`yatt_mm.genrm`) use this package too.

May import: common, dataplane.client, dataplane.core, dataplane.media, models, models.recipes, models.weights, protocol,
weights.
"""
