"""Making objects: derived objects from media with a recipe, and sources from their shards, each made once.

`deriver.py` is the entry: it starts one task per object and lets all callers wait for it. `materializer.py` makes one
object, in a worker process of `decode_pool.py` (`worker_handle.py` is the node's side, `worker_main.py` the worker).
`prepare.py` does this for whole samples of a dataset. `fetch_or_make.py` asks other nodes first, `prefetch.py` works
ahead, and `quarantine.py` remembers media that failed,
also those that killed their worker twice.

May import: cluster, core, datasets, datasets.formats, media, media.recipes, storage.
"""
