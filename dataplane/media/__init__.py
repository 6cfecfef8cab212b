"""Media: decoding images and videos into pixels, and refusing what is broken, mislabelled or too large.

`images.py` and `videos.py` decode; a new codec or container is added there, in `kinds.py` (formats by file name) and in
`containers.py`. `limits.py` holds the limits of a node. What is made of the pixels is in `recipes/`. This code runs in
worker processes.

May import: nothing.
"""
