"""A controller's generation phase: prompts become groups of responses with rewards.

The way of a group is one coroutine over three stages: `rollout_stage.py` (engines sample responses, and continue groups
whose engine was put to sleep), `reward_stage.py` (the reward function) and `judge_stage.py` (judges; another engine
judges the groups of a judge's engine that was put to sleep). `batch_filler.py` chooses between a stream
(`streaming.py`) and rounds (`rounds.py`). `engine_requests.py` gets engines for groups, `tick_batch.py` puts calls
together, `phase_calls.py` ends them together, and `metrics.py` has the step's metrics. Before it, `prompts.py` makes
prompts of samples: `conversation_reader.py` reads their conversations, and `prompt_check.py` looks whether an engine
could take them.

May import: algorithms, batching, common, config, dataplane.client, dataplane.core, dataplane.datasets, dataplane.media,
models.recipes, placement, protocol, rollout.
"""
