"""The file formats of datasets, one module each, behind the Protocol in `shard.py`.

A new format is a new module here, its file names and first bytes in `datasets/roots.py`, and the line that opens it in
`datasets/catalog.py`. `range_files.py` reads byte ranges of local and remote
files, `tar_index.py` indexes tars, `columns.py` decides which columns are media, and `media_paths.py` which files a row
may name.

May import: core, media.
"""
