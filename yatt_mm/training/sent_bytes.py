"""What a training rank sends to other hosts: bytes by the kind of work in which it sends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from yatt_mm.common.traffic import SentToHosts


class SentBytes:
    """The counters of one rank. All of its connections count, those of Ray too; what NCCL sends over InfiniBand does
    not."""

    def __init__(self, is_counted: bool) -> None:
        """`is_counted`: False leaves all counters at nothing."""
        self._traffic = SentToHosts() if is_counted else None
        self._by_kind: dict[str, int] = {}

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Count what is sent in a block as being of this kind."""
        if self._traffic is None:
            yield
            return
        self._traffic.take_bytes()  # what came before is of no kind
        try:
            yield
        finally:
            self._by_kind[kind] = self._by_kind.get(kind, 0) + self._traffic.take_bytes()

    def take(self) -> dict[str, int]:
        """Return the bytes of each kind since the last call."""
        taken, self._by_kind = self._by_kind, {}
        return taken
