"""Checks before anything heavy starts: model folder, layout, devices, shards, fields, judges, reward function;
and that the packages which Python finds are this project's.

May import: common, config, dataplane.client, dataplane.core, dataplane.datasets, dataplane.datasets.formats,
generation, genrm, models, models.layout, models.recipes, models.weights, protocol, rewards, rollout.
"""
