"""Handwritten digits: a tiny Qwen2.5-VL learns to read real scans, from rewards for right responses only.

Importing `models` here, before any module of this package imports torch, installs the hooks of `models.compat`.
"""

import models as models
