"""Every environment variable that vLLM must find before it is imported or before it starts a process. One place.

`spawning` puts the environment back when the engine is up: vLLM adds variables of its own (LD_PRELOAD among them)
that must not reach other children of the calling process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings on the CPU are many and need no action
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else each worker of an engine wants a NUMA node to itself
    "TOKENIZERS_PARALLELISM": "false",
}
"""Hold for the whole process, unless the user set them."""


@contextmanager
def spawning(*, num_threads: int, tmp_dir: str) -> Iterator[None]:
    """The environment in which vLLM may be imported and an engine be started.

    tmp_dir: where sockets and other temporary files of the engine go; whoever made it removes it.
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
            "HF_HUB_OFFLINE": "1",  # the folder is local: nothing is to be looked up
            "JOBLIB_MULTIPROCESSING": "0",  # imported by transformers; its semaphore would outlive a killed engine
        }
    )
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def run_eagerly() -> None:
    """Let no process started from here on compile: on the CPU vLLM's sampler alone would take 10 s at its first use."""
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
