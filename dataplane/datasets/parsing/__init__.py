"""Files of data sets are parsed in processes of their own, so that a file that crashes a parser ends nothing else.

`tasks.py` does the tasks that the shards in `formats/` ask for. `process_main.py` does them in a child process over the
frames of `frames.py`, `process.py` is the node's end of one such process, and `pool.py` has a few of them.
`in_process.py` does the same tasks without another process.

May import: core, datasets.formats.
"""
