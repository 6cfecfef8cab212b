"""Training steps in discrete events: the real rules (placement, sampling, balance) on modelled devices.

May import: batching, common, config, placement, training.
"""
