"""The repairs that let vLLM, transformers and megatron-core run on a machine whose torch has no CUDA.

`install` is cheap, imports no torch, and does nothing on a CUDA torch. Every process needs it: importing `models` calls
it, and each process of vLLM calls `register` first (entry point vllm.platform_plugins). The repairs of megatron are
separate (`models.compat.megatron`), because only trainers need them.

May import: nothing.
"""

from models.compat import cuda_builds


def install() -> None:
    """Make CUDA builds of torchvision, torchaudio and torchcodec harmless beside a CPU torch."""
    cuda_builds.install()


def register() -> None:
    """Install the hooks, as the entry point of vllm.platform_plugins. The result None means that no platform is
    offered."""
    install()
