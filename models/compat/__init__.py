"""What lets vLLM, transformers and megatron-core run on a machine whose torch has no CUDA. One place.

`install` is cheap, imports no torch, does nothing on a CUDA torch, and must hold in every process: importing
`models` calls it, and vLLM calls `register` first thing in each of its processes (vllm.platform_plugins).
The megatron side is separate (`models.compat.megatron`), because only trainers need it.

May import: nothing.
"""

from models.compat import cuda_builds


def install() -> None:
    """Make CUDA builds of torchvision, torchaudio and torchcodec harmless next to a CPU torch."""
    cuda_builds.install()


def register() -> None:
    """Install the hooks, as the entry point of vllm.platform_plugins. Returning None offers no platform."""
    install()
