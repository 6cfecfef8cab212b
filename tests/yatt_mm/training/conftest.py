"""Fixtures with the model folders of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.yatt_mm.training.tiny import build_folder


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose head has weights of its own."""
    return build_folder(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose head shares the embedding's weights."""
    return build_folder(tmp_path_factory.mktemp("tied"), is_head_tied=True)


@pytest.fixture(scope="session")
def experts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with experts."""
    return build_folder(tmp_path_factory.mktemp("experts"), "qwen3_vl_moe")


@pytest.fixture(scope="session")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with four layers and a tied head, for pipeline stages that are uneven, or divided into virtual
    stages."""
    return build_folder(tmp_path_factory.mktemp("deep"), "qwen2_5_vl_deep", is_head_tied=True)
