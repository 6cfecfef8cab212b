"""An order of eviction: which objects may go, the oldest first, and how many bytes they take together."""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from dataplane.storage.entries import Entry


class EvictionOrder:
    """Objects that may go, oldest first. The store's lock guards it."""

    def __init__(self, size_of: Callable[[Entry], int]) -> None:
        """`size_of` gives the bytes that become free when an object goes."""
        self.total_bytes = 0
        """The bytes of all objects together."""
        self._size_of = size_of
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, entry: Entry) -> None:
        """Add an object as the youngest. One that is here keeps its place."""
        if entry.ref.name not in self._entries:
            self._entries[entry.ref.name] = entry
            self.total_bytes += self._size_of(entry)

    def remove(self, entry: Entry) -> None:
        """Take an object out, if it is here."""
        if self._entries.pop(entry.ref.name, None) is not None:
            self.total_bytes -= self._size_of(entry)

    def make_youngest(self, name: str) -> None:
        """Make an object the last to go, if it is here."""
        if name in self._entries:
            self._entries.move_to_end(name)

    def make_oldest(self, name: str) -> None:
        """Make an object the first to go, if it is here."""
        if name in self._entries:
            self._entries.move_to_end(name, last=False)
