"""Controllers: the training loop (`loop.py`) and what each of its calls does (`controller.py`). Imports no torch.

May import: algorithms, batching, common, config, dataplane.client, dataplane.core, generation, placement, protocol,
training.
"""
