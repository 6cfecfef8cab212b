"""A controller's generation phase: prompts become groups of responses with rewards.

A group passes three stages: `rollout_stage.py` (engines sample responses, and continue groups whose engine was put to
sleep), `reward_stage.py` (the reward function) and `judge_stage.py` (judges;
another engine judges the groups of a judge's engine that was put to sleep). `batch_filler.py` chooses between a
stream (`streaming.py`) and rounds (`rounds.py`). `pending_calls.py` is the event loop, `metrics.py` the step's metrics.

May import: algorithms, batching, common, config, dataplane.client, dataplane.core, models.recipes, placement, protocol.
"""
