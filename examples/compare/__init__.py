"""Pairs of handwritten digits: a tiny Qwen2.5-VL learns from two images in one question which digit is larger, from
rewards for right answers only.

Importing `models` here, before any module of this package imports torch, installs the hooks of `models.compat`.
"""

import models as models
