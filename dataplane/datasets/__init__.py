"""Datasets: from the files that a node's owner registers to samples with refs, and the sampler that orders them.

`roots.py` finds the files of a registered root, `catalog.py` indexes them and gives samples, and `sampler.py` decides
which samples come next. The file formats (tar, Parquet, Arrow, JSON lines) are in `formats/`. Media are named by digest
here, not decoded.

May import: core, datasets.formats, datasets.parsing.
"""
