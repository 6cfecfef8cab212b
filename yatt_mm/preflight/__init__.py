"""Checks before anything heavy starts: model folder, layout, devices, shards, fields, judges, reward function.

May import: common, config, dataplane.client, dataplane.core, dataplane.datasets, models, models.layout, models.recipes,
protocol, rewards.
"""
