"""The survey: what a data set is like, as a run will use it.

`survey.py` makes prompts of samples and measures them, `tables.py` shows the numbers and the first samples in a
terminal, and `histograms.py` draws them. `look.py` does all of it for the sets of a config.

May import: common, config, dataplane.client, dataplane.core, dataplane.datasets, generation, models.recipes, preflight,
protocol, rollout, hosts.
"""
