"""The settings of LoRA. No torch here, because launchers send them to training ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which layers get adapters, and of which size."""

    rank: int
    """The columns of B and the rows of A, in the product B A that is added to a weight."""
    alpha: float
    """The product is multiplied by alpha / rank."""
    targets: tuple[str, ...]
    """Parts of the model (`language`, `tower`, `merger`), all of whose linear layers are adapted, or linear layers of
    a part by their name in Hugging Face's model, such as `language.q_proj`."""

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / self.rank

    @property
    def parts(self) -> frozenset[str]:
        """The parts of the model in which layers are adapted."""
        return frozenset(target.partition(".")[0] for target in self.targets)
