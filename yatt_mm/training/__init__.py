"""The training side: samples in, optimizer updates out, on Megatron-core.

May import: algorithms, common, dataplane.client, models, models.compat, models.layout, models.sequence, models.weights,
protocol, weights.
"""
