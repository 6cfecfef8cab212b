"""The file formats of datasets, one module each, behind the Protocol in `shard.py`; also reading byte ranges of
files."""
