"""The engine side of publishing: load a segment of this host or of this GPU, a stream, or the model's own folder.

Runs in vLLM's worker. Layers are reloaded one by one through vLLM's own reload, because on the CPU vLLM packs weights
after loading and leaves empty parameters behind: a plain `load_weights` into a running model corrupts it.
Left out: pausing the engine and resetting its caches, which is `Engine.update_weights`' job.
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
from yatt_mm.weights.segment import MappedSegment, views


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Nothing: the path comes with each update."""


@dataclass
class ShmUpdateInfo(WeightTransferUpdateInfo):
    """One update."""

    version: int
    """The policy version that is wanted."""
    path: str
    """A file of `yatt_mm.weights.segment`, or a model folder, that this host's processes can map."""
    devices: list[dict[str, Any]]
    """Fields of `DeviceSegment`s; where there are any, the one of this GPU is read instead of the file."""
    stream: dict[str, Any] | None
    """Fields of a `WeightStream`; where there is one, it is received instead."""


class ShmWeightTransferEngine(WeightTransferEngine[ShmInitInfo, ShmUpdateInfo]):
    """Maps the segment and hands its views to the model's own weight loader."""

    init_info_cls = ShmInitInfo
    update_info_cls = ShmUpdateInfo
    _segment: MappedSegment | None = None

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        """Prepare the layers for being loaded again."""
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the tensors of one segment."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShmUpdateInfo) -> None:
        """Copy from the stream, GPU memory or the mapped files into the model."""
        model = cast(Any, self.model)
        if update_info.stream:
            name = f"{self.model_config.served_model_name} (process {self.parallel_config.rank})"
            model.load_weights(receive(WeightStream(**update_info.stream), self.device, name))
        elif update_info.devices:
            found = segment_on(gpu_uuid(self.device), update_info.devices)
            model.load_weights(views(open_shared(found["handle"], self.device), found["index"]))
        elif Path(update_info.path).is_dir():
            files = CheckpointFiles(Path(update_info.path))
            model.load_weights((name, files.read(name)) for name in files.names)
        else:
            self._segment = MappedSegment(update_info.path, update_info.version)
            model.load_weights(iter(self._segment))

    def finish_weight_update(self) -> None:
        """Bring the layers into the form that computes. Raises SegmentError where the trainer wrote meanwhile."""
        finalize_layerwise_reload(self.model, self.model_config)
        for embeds in getattr(self.model, "deepstack_input_embeds", None) or ():
            embeds.zero_()  # neither parameter nor buffer: what deep sleep leaves in it nobody else clears (vLLM 0.32)
        if self._segment:
            self._segment.check_unchanged()
            self._segment = None

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def _pack_experts_again(model: torch.nn.Module) -> None:
    """Let the next load pack the experts' weights as the first one did.

    vLLM 0.32 packs them for the CPU's kernel only while it makes that kernel. A layer that has its kernel would get
    weights as they stand in the checkpoint, and the kernel would read them in the wrong order: no error, wrong answers.
    """
    for layer in model.modules():
        if isinstance(layer, RoutedExperts) and isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
            layer.quant_method.moe_kernel = None
