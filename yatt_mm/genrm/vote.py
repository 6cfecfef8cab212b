"""One verdict on one response, from the question to the score."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dataplane.core.refs import Ref


@dataclass(slots=True)
class Vote:
    """One verdict on one response, from the question to the score."""

    prompt: list[int]
    media: tuple[Ref, ...]
    seed: int
    score: float | None = None
    text: str = ""
    """What the judge wrote, in its last attempt."""
    num_asked: int = 0
    num_tokens: int = 0
    """The number of tokens that the judge wrote, in all attempts together."""
    why: str = ""
    """Why there is no score."""
    is_final: bool = False
    """True if the vote needs no other attempt: it has a score, was cut off, or would get the same verdict again."""
    is_cut_off: bool = False
    """True if the engine fell asleep before the verdict was complete."""

    def key(self) -> tuple[bytes, tuple[str, ...]]:
        """Return the model's whole input, for comparing votes: token ids and names of media."""
        return np.asarray(self.prompt).tobytes(), tuple(ref.name for ref in self.media)
