"""Starting, watching and stopping a run, and what people see of it.

`launch.py` is the entry: it takes the keys of judges' servers out of the environment (`judge_keys.py`), starts the data
plane's node (`run_node.py`), finds where the run begins (`start_point.py`), starts Ray (`cluster.py`) and the actors
(`team.py`, `judge_actors.py`), and stops them again. `report.py` writes metrics and progress, `tensorboard_file.py`
what TensorBoard shows, `timeline.py` the timeline. `learning_watch.py` sees whether there is anything to learn,
`run_dir.py` guards the run's folder, `signals.py` handles Ctrl-C and SIGTERM.

May import: batching, common, config, control, dataplane.client, dataplane.core, dataplane.datasets, generation, genrm,
keeper, models, models.recipes, placement, preflight, protocol, rewards, rollout, training.
"""
