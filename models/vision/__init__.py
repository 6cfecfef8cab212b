"""The vision tower: Hugging Face's module, replicated over ranks. Each rank encodes a part of the images.

May import: layout, sequence.
"""
