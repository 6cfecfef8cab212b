"""The trainer. Importing it installs the hooks that CPU builds of torch need, before anything imports torch."""

import models  # noqa: F401
