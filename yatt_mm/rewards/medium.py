"""A medium of a prompt for reward functions: its pixels come from the data plane when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from dataplane.client.client import Client
from dataplane.client.reader import Reader
from dataplane.core.errors import DataPlaneError
from dataplane.core.refs import BadMedia, Ref
from dataplane.media.kinds import MediaKind
from yatt_mm.common.media_refs import kind_of


class Medium:
    """An image or a video of a prompt."""

    def __init__(self, ref: Ref, client: Client, reader: Reader) -> None:
        """`ref`: the patches that the model sees, whose source has the pixels."""
        self._ref = ref
        self._client = client
        self._reader = reader

    @property
    def kind(self) -> MediaKind:
        """`image` or `video`."""
        return kind_of(self._ref)

    def image(self) -> Image.Image:
        """Return the image in RGB, in the size of its file. Raises ValueError for a video, and DataPlaneError if the
        data plane cannot make it."""
        if self.kind != "image":
            raise ValueError("the medium is a video; call frames()")
        return Image.fromarray(self._made({"kernel": "rgb", "version": 1}))

    def frames(self) -> list[Image.Image]:
        """Return the frames of a video that the model sees, in RGB and in the size of its file; for an image the image.
        Raises DataPlaneError if the data plane cannot make them."""
        if self.kind == "image":
            return [self.image()]
        assert self._ref.lineage is not None and self._ref.lineage.recipe is not None
        patches = self._ref.lineage.recipe
        recipe = {
            "kernel": "frames",
            "version": 1,
            "sampling": patches["sampling"],
            "multiple": patches["temporal_patch_size"],
        }
        return [Image.fromarray(frame) for frame in self._made(recipe)]

    def _made(self, recipe: Mapping[str, Any]) -> np.ndarray:
        (made,) = self._client.derive([self._ref], recipe)
        if isinstance(made, BadMedia):
            raise DataPlaneError(f"{made.shard} {made.key}: {made.reason}")
        (view,) = self._reader.resolve([made])
        return np.array(view)  # a copy, because the function may keep it
