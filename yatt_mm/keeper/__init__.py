"""What the model said, as files: the keeper (`keeper.py`) writes the responses of each step to a table (`table.py`),
which can be read when the run and its data plane are long gone. It also writes the groups of begun steps, and puts them
back at the data plane (`group_files.py`). Imports no torch.

May import: common, dataplane.client, dataplane.core, protocol.
"""
