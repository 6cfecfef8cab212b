"""The only door to megatron-core: every name that this project uses, imported after `prepare`.

No other module imports `megatron`, so this list is what must be checked when its version changes.
"""

from models.compat.megatron import prepare

prepare()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import (  # noqa: E402
    MegatronOptimizer,
    OptimizerConfig,
    ParamGroupOverride,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402
from megatron.core.tensor_parallel.layers import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.enums import AttnMaskType, ModelType  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.transformer_block import (  # noqa: E402
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset  # noqa: E402

__all__ = [
    "AttnMaskType",
    "ColumnParallelLinear",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "MegatronOptimizer",
    "ModelType",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "ParamGroupOverride",
    "ParamKey",
    "ParamWithNamePredicate",
    "ProcessGroupCollection",
    "RowParallelLinear",
    "ShardedTensor",
    "ShardedTensorFactory",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "VocabParallelEmbedding",
    "finalize_model_grads",
    "get_forward_backward_func",
    "get_gpt_layer_local_spec",
    "get_gpt_layer_with_transformer_engine_spec",
    "get_megatron_optimizer",
    "get_num_layers_to_build",
    "get_standard_config_overrides",
    "get_transformer_layer_offset",
    "parallel_state",
    "set_tensor_model_parallel_attributes",
    "tensor_parallel",
]
