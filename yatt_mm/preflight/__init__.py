"""Checks before anything heavy starts: model folder, layout, devices, shards, fields, judges, reward function.

May import: common, config, dataplane.client, dataplane.core, dataplane.datasets, dataplane.datasets.formats,
generation, genrm, models, models.layout, models.recipes, models.weights, protocol, rewards, rollout.
"""
