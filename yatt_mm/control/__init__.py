"""Controllers: the training loop in verbs (`loop.py`) and what each verb does (`controller.py`). Imports no torch.

May import: algorithms, common, config, dataplane.client, generation, placement, protocol, training.
"""
