"""The vision tower: Hugging Face's module, replicated over ranks, with the images dealt out among them.

May import: layout, sequence.
"""
