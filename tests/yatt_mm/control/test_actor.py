"""Tests of what a controller's actor does at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dataplane.client.client import Client
from dataplane.client.embedded import EmbeddedNode
from dataplane.client.reader import Reader
from yatt_mm.control import actor


@pytest.mark.parametrize("trains", [True, False])
def test_a_controller_looks_at_itself_when_it_has_ended(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = object.__new__(actor.ControllerActor)
    controller._controller = cast(Any, SimpleNamespace(config=SimpleNamespace(trains=trains), abort=pytest.fail))
    monkeypatch.setattr(actor, "train" if trains else "evaluate", lambda controller: 7)
    with EmbeddedNode(memory_bytes=2**20, roots={}) as node, Client(node.uri) as client:
        (segment,) = client.stat()["segments"]
        assert segment["path"].startswith(actor.SEGMENT_MARK)
        monkeypatch.setattr(actor, "SEGMENT_MARK", segment["path"])  # others may be mapped for other tests
        monkeypatch.setattr(actor, "sys", SimpleNamespace(modules={"numpy": np}))
        assert controller.run() == 7
        for name in actor.FORBIDDEN_MODULES:
            monkeypatch.setattr(actor, "sys", SimpleNamespace(modules={name: None}))
            with pytest.raises(AssertionError, match=f"a controller imported .'{name}'"):
                controller.run()
        monkeypatch.setattr(actor, "sys", SimpleNamespace(modules={"numpy": np}))
        with Reader(node.uri), pytest.raises(AssertionError, match="a controller maps segments of the data plane"):
            controller.run()
