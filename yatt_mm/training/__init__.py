"""The training side on Megatron-core: plans and their balance, the training ranks, their optimizer, checkpoints and
memory.

`step_plan.py` decides which rank trains which sample (`balance.py`, `microbatches.py`). `worker.py` is a rank's body,
`megatron_engine.py` the model with its updates, `optimizer.py` AdamW, `rank_checkpoint.py` saving and loading, and
`offload.py` releasing device memory.

May import: algorithms, common, dataplane.client, models, models.compat, models.layout, models.sequence, models.weights,
protocol, weights.
"""
