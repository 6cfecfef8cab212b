"""The file formats of datasets, one module each, behind the Protocol in `shard.py`.

A format has two sides. In the node, `tar.py`, `jsonl.py` and `table.py` are shards: they ask a parser (`parser.py`),
give media their names, and know which files a row may name (`media_paths.py`). In the parser, `tar_index.py`,
`member_fields.py`, `json_items.py`, `json_rows.py`, `parquet.py`, `arrow.py` and `table_rows.py` interpret bytes.
`range_files.py` reads byte ranges of local and remote files for both.

A new format is a new module for each side, its file names and first bytes in `datasets/roots.py`, the line that opens
it in `datasets/catalog.py`, and its tasks in `datasets/parsing/tasks.py`.

May import: core, media.
"""
