"""Starting, watching and stopping a run.

`supervisor.py` is the process of the command, and starts the launcher (`supervised.py` is what they tell each other).
`launch.py` is the launcher: it takes the keys of judges' servers out of the environment (`judge_keys.py`), starts the
data plane's node (`yatt_mm.hosts`), finds where the run begins (`start_point.py`), starts Ray (`cluster.py`,
`ray_agent.py`) and the actors (`crew.py`, `makers.py`, `judge_actors.py`), and stops them again. `watch.py` watches
them, and `repairs.py` makes again what a fault took (`losses.py` finds it). `run_dir.py` guards the run's folder,
`signals.py` handles Ctrl-C and SIGTERM.

May import: batching, common, config, control, dataplane.client, dataplane.core, dataplane.datasets, generation, genrm,
hosts, keeper, models, models.recipes, placement, preflight, protocol, reporting, rewards, rollout, training.
"""
