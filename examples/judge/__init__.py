"""A generative reward model for the digits: a second tiny VLM sees the scan and a response, and says yes or no.

Importing `models` here, before any module of this package imports torch, installs the hooks of `models.compat`.
"""

import models as models
