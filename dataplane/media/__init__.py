"""Media: decoding images and videos into pixels, and refusing what is broken, mislabelled or too large.

`images.py` decodes with Pillow, `videos.py` with decord. A new image format is added in `images.py` and `kinds.py`. A
new video container is added in `kinds.py` (file names, first bytes), `containers.py` (is the file complete?) and
`video_headers.py` (frame size); the codecs inside a container are those of decord. `limits.py` holds the limits of a
node. What is made of the pixels is in `recipes/`. This code runs in worker processes.

May import: nothing.
"""
