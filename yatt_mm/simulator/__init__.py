"""The simulator: it replays training steps as discrete events. The rules (placement, sampling, balance) are the real
ones; the devices are modelled.

`layouts.py` compares the layouts of devices: `turn_layouts.py` and `asynchronous_layout.py` run them, `generation.py`
simulates the generation phase, `modelled_engine.py` one engine with continuous batching, and `training.py` the update.
`config.py` has every modelled speed with its source.

May import: batching, common, config, placement, training.
"""
