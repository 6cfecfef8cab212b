"""The training side on Megatron-core: plans and their balance, the training ranks, their optimizer, checkpoints and
memory.

`step_plan.py` decides which rank trains which sample (`balance.py`, `microbatches.py`). `worker.py` is a rank's body,
`planned_samples.py` what it trains, `megatron_engine.py` the model with its updates, `critic.py` the second one of PPO,
`optimizer.py` AdamW, and `offload.py` releases device memory.
`rank_checkpoint.py` saves and loads: `boxes.py` says where the parts of tensors lie, `part_files.py` writes and reads
them.

May import: algorithms, common, dataplane.client, dataplane.core, models, models.compat, models.layout, models.lora,
models.sequence, models.weights, protocol, weights.
"""
