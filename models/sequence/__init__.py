"""Samples as one packed sequence: media tokens, positions, packing, and attention that stays inside sequences.

`packing.py` makes the packed batch of a microbatch, `media_tokens.py` finds the tokens of images and videos,
`mrope.py` gives positions, `distinct_media.py` deals media out to ranks, `context_share.py` cuts a batch for context
parallelism, and `attention.py` has the attention functions.

May import: layout.
"""
