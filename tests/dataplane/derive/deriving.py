"""Derives media in a node in this process, and reads the results."""

import time
from typing import Any

import numpy as np

from dataplane.core.refs import BadMedia, Ref
from dataplane.server.node import Node

DEADLINE_S = 240.0
"""Workers that are killed start again, which takes its time on a busy machine."""


def derive(node: Node, numbers: list[int], recipe: Any) -> list[Ref | BadMedia]:
    media = [node.services.datasets.samples("a", [number])[0].media[0] for number in numbers]
    return node.services.deriver.derive(media, recipe, time.monotonic() + DEADLINE_S)


def read(node: Node, ref: Ref | BadMedia) -> np.ndarray:
    assert isinstance(ref, Ref), ref
    entry = node.services.store.find(ref.name)
    assert entry is not None
    return node.services.store.content(entry).reshape(ref.shape).copy()
