"""The file formats that a dataset may have, one file each, behind the Protocol in `shard.py`."""
