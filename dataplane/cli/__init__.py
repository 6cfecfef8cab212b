"""The command line `python -m dataplane`: run a node, and store, read and list objects from a terminal.

`main.py` has the parser and the entry point. `serve.py` runs a node, with the options in `serve_options.py`.
`commands.py` has the commands that call a node, and `top.py` the live picture of one. `parsers.py` parses option
values, and `progress.py` draws progress bars.

May import: client, core, datasets, media, server, storage.
"""
