"""Which engine answers which prompt: the one with the least work waiting, over all controllers. Metadata only."""

from __future__ import annotations

from collections.abc import Sequence


class Router:
    """Body of a small Ray actor.

    Consumes: sizes of the prompts that a controller is about to send.  Produces: an engine for each.
    """

    def __init__(self, *, num_engines: int) -> None:
        self._load = [0.0] * num_engines

    def assign(self, sizes: Sequence[float]) -> list[int]:
        """[prompt] engine; the dearest prompts are placed first."""
        engines = [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            engine = self._load.index(min(self._load))
            engines[i] = engine
            self._load[engine] += sizes[i]
        return engines

    def finish(self, engine: int, size: float) -> None:
        """An engine is done with work of this size."""
        self._load[engine] = max(0.0, self._load[engine] - size)
