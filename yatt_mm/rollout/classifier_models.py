"""Classifiers of families whose head vLLM looks for in another place than where folders keep it.

vLLM 0.32 makes a classifier of a model by giving it a head named `score`, and where the language model inside is made
from vLLM's registry it is that one which gets the head. Folders keep it beside the model, as `score.weight`. Known to
vLLM by the name of the class (`plugin`). Qwen3-VL's language model is made otherwise, and needs nothing.
"""

from vllm.model_executor.models.interns1 import InternS1ForConditionalGeneration
from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper

_INSIDE = WeightsMapper(orig_to_new_prefix={"score.": "language_model.score."})


class Qwen2_5_VLForSequenceClassification(Qwen2_5_VLForConditionalGeneration):
    """Takes the head that a folder keeps beside the model."""

    hf_to_vllm_mapper = Qwen2_5_VLForConditionalGeneration.hf_to_vllm_mapper | _INSIDE


class InternVLForSequenceClassification(InternS1ForConditionalGeneration):
    """The same."""

    hf_to_vllm_mapper = InternS1ForConditionalGeneration.hf_to_vllm_mapper | _INSIDE
