"""What must be set before vLLM is imported or starts a process: environment variables, and what the process runs first.

`spawning` restores the environment when the engine has started: vLLM itself adds variables (LD_PRELOAD for example)
that must not reach other children of the calling process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from typing import Any

_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # on the CPU it prints many warnings that need no action
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker of an engine needs its own NUMA node
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set for the whole process, unless the user has set them."""
MAIN = "yatt_mm.rollout.core_main"
_preparation_data = spawn.get_preparation_data


@contextmanager
def spawning(*, num_threads: int, tmp_dir: str) -> Iterator[None]:
    """Set the environment in which vLLM may be imported and an engine may be started; restore it afterwards.

    num_threads: threads that compute on the CPU.
    tmp_dir: folder for sockets and other temporary files of the engine; the caller removes it.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    before = dict(os.environ)
    os.environ.update(
        {
            "OMP_NUM_THREADS": str(num_threads),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "VLLM_RPC_BASE_PATH": tmp_dir,
            "TMPDIR": tmp_dir,
            "HF_HUB_OFFLINE": "1",  # the model folder is local, so nothing is looked up
            # a killed engine leaves semaphores, which multiprocessing's tracker removes, and warns of
            "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"])),
            # transformers imports joblib; its semaphore would stay when an engine is killed
            "JOBLIB_MULTIPROCESSING": "0",
        }
    )
    spawn.get_preparation_data = _with_own_main
    try:
        yield
    finally:
        spawn.get_preparation_data = _preparation_data
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def _with_own_main(name: str) -> dict[str, Any]:
    """Return what multiprocessing tells a process that it starts, with `core_main` as its main module."""
    told = _preparation_data(name)
    told.pop("init_main_from_path", None)
    return told | {"init_main_from_name": MAIN}


def run_eagerly() -> None:
    """Disable torch.compile in processes that are started from now on.

    On the CPU, vLLM's sampler alone would compile for 10 s at its first use.
    """
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
