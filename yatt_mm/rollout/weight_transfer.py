"""Weight updates inside vLLM: load the weights from memory of this host or of this GPU, from a weight stream, or from a
model folder.

This module runs in vLLM's worker processes. Layers are reloaded one by one through vLLM's own reload. This is necessary
because on the CPU vLLM packs weights after loading and leaves empty parameters: a plain `load_weights` into a running
model would corrupt it. Left out: pausing the engine and emptying its caches, which `VllmEngine.update_weights` does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from models.weights.checkpoint_files import CheckpointFiles
from yatt_mm.protocol.published import WeightStream, segment_on
from yatt_mm.weights.buckets import receive
from yatt_mm.weights.cuda_ipc import gpu_uuid, open_shared
from yatt_mm.weights.segment import MappedSegment, index_file, views


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Arguments of the initialisation: none, because the path comes with each update."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """The arguments of one weight update; the fields are those of `Published`."""

    version: int
    """The policy version to load."""
    path: str
    """A segment file (`yatt_mm.weights.segment`) or a model folder, which the processes of this host can read."""
    devices: list[dict[str, Any]]
    """The fields of `DeviceSegment`s. If there are any, that of this GPU is read, with the index beside `path`."""
    stream: dict[str, Any] | None
    """The fields of a `WeightStream`. If it is given, the stream is received instead of everything else."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """vLLM's weight-transfer engine `yatt_shm`: gives views of published tensors to the model's own weight loader."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    _segment: MappedSegment | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Do nothing: there is no connection between updates."""

    def start_weight_update(self) -> None:
        """Prepare the layers so that they can be loaded again."""
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors of one update, and wait until the device has them."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Copy the tensors into the model: from the stream, GPU memory, a model folder or a segment."""
        model = cast(Any, self.model)
        if update_info.stream:
            name = f"{self.model_config.served_model_name} (process {self.parallel_config.rank})"
            model.load_weights(receive(WeightStream(**update_info.stream), self.device, name))
        elif update_info.devices:
            found = segment_on(gpu_uuid(self.device), update_info.devices)
            model.load_weights(
                views(open_shared(found["handle"], self.device), index_file(update_info.path).read_bytes())
            )
        elif Path(update_info.path).is_dir():
            files = CheckpointFiles(Path(update_info.path))
            model.load_weights((name, files.read(name)) for name in files.names)
        else:
            self._segment = MappedSegment(update_info.path, update_info.version)
            model.load_weights(iter(self._segment))

    def finish_weight_update(self) -> None:
        """Bring the layers into the form in which they compute.

        Raises SegmentError if the trainer wrote into the segment in the meantime.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for embeds in getattr(self.model, "deepstack_input_embeds", None) or ():
            embeds.zero_()  # vLLM 0.32 does not clear it after a deep sleep: it is no parameter and no buffer
        if self._segment:
            self._segment.check_unchanged()
            self._segment = None

    def shutdown(self) -> None:
        """Do nothing: no memory and no connection is held between updates."""


def _pack_experts_again(model: torch.nn.Module) -> None:
    """Make the next load pack the experts' weights like the first load.

    vLLM 0.32 packs them for the CPU kernel only when it makes that kernel. A layer that already has its kernel would
    get weights in the checkpoint's order, and the kernel would read them in the wrong order. The results would be
    wrong, without any error.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            layer.quant_method.moe_kernel = None
