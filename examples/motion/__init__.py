"""Digits that move: a tiny Qwen2.5-VL learns from video clips which way they go, by right-or-wrong rewards alone.

Importing `models` here, before any module of this package imports torch, installs the hooks of `models.compat`.
"""

import models as models
