"""vLLM model classes for sequence classifiers of Qwen2.5-VL and InternVL, which load the head from the right place.

vLLM 0.32 turns a model into a classifier by adding a head named `score`. If the model makes its language model from
vLLM's registry, the language model gets the head. But the model folders store the head at the top level, as
`score.weight`, so these classes map the name. `plugin` registers them with vLLM under the names of the classes.
Qwen3-VL makes its language model in another way and needs no class here.
"""

from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper

_INSIDE = WeightsMapper(orig_to_new_prefix={"score.": "language_model.score."})
"""Maps the head's name in a folder to its name in vLLM's model."""


class Qwen2_5_VLForSequenceClassification(Qwen2_5_VLForConditionalGeneration):
    """Qwen2.5-VL as a classifier: loads the head, which a model folder stores under the name `score.weight`."""

    hf_to_vllm_mapper = Qwen2_5_VLForConditionalGeneration.hf_to_vllm_mapper | _INSIDE


class InternVLForSequenceClassification(InternS1ForConditionalGeneration):
    """InternVL as a classifier: loads the head, which a model folder stores under the name `score.weight`."""

    hf_to_vllm_mapper = InternS1ForConditionalGeneration.hf_to_vllm_mapper | _INSIDE
