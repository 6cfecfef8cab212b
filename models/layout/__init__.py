"""Parallel layouts: how a training world is divided into tensor, pipeline, context, expert and data parallelism.

`parallel.py` is the description of a layout and its checks, `stages.py` divides layers over pipeline stages,
`context_parallel.py` tokens over context-parallel ranks, and `gather.py` is an all-gather with gradients.

May import: compat.
"""
