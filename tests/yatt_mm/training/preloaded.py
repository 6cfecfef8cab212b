"""What the server of the training ranks imports before ranks are forked from it, as training actors import it."""

from yatt_mm.common.large_imports import large_imports

with large_imports():
    import models.compat.megatron_core  # noqa: F401
    import tests.yatt_mm.training.jobs  # noqa: F401
