"""Digits that move: a tiny Qwen2.5-VL learns from video clips in which direction they go, from rewards for right
answers only.

Importing `models` here, before any module of this package imports torch, installs the hooks of `models.compat`.
"""

import models as models
