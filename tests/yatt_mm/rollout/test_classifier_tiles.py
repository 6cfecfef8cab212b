"""Tests InternVL as a classifier: its head has a name that vLLM does not know, and its text config has labels of its
own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.yatt_mm.rollout.classifiers import build_classifier
from tests.yatt_mm.rollout.conftest import Run, engine_config
from tests.yatt_mm.rollout.internvl import build_internvl_folder
from tests.yatt_mm.rollout.test_internvl import ASKED, processed, request_of
from yatt_mm.rollout.vllm_engine import VllmEngine


@pytest.mark.parity
def test_internvl_labels_text_one_tile_and_several(run: Run, tmp_path: Path) -> None:
    source = build_internvl_folder(tmp_path / "internvl", 0)
    folder = build_classifier(source, tmp_path / "classifier", num_labels=3)
    requests = [dataclasses.replace(request_of(source, asked), seeds=(0,), max_tokens=0) for asked in ASKED[:4]]

    async def label() -> list[tuple[float, ...]]:
        engine = await VllmEngine.start(engine_config(folder, name="internvl", num_labels=3))
        try:
            return [sampled.label_logits for (sampled,) in await engine.generate_batch(requests)]
        finally:
            await engine.shutdown()

    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).model
    head = load_file(folder / "model.safetensors")["score.weight"]
    for found, asked in zip(run(label()), ASKED[:4], strict=True):
        with torch.no_grad():
            hidden = model(**processed(source, asked)).last_hidden_state
        assert found == pytest.approx((head @ hidden[0, -1]).tolist(), abs=1e-4)
