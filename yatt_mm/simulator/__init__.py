"""The simulator: training steps in discrete events, with the real rules (placement, sampling, balance) on modelled
devices.

`layouts.py` compares the layouts of devices: `turn_layouts.py` and `asynchronous_layout.py` run them, `generation.py`
is the generation phase, `modelled_engine.py` one engine with continuous batching, `training.py` the update. `config.py`
has every modelled speed with its source.

May import: batching, common, config, placement, training.
"""
