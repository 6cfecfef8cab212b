"""The soak's knowledge of every object: who put it, when, and what may have removed it. It judges objects that readers
miss."""

import random
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

MAX_MADE = 2000
MAX_NAMED = 20
"""The maximum number of missing objects that findings name."""


@dataclass(slots=True)
class Put:
    """An acknowledged object without a lineage."""

    ref: dict[str, Any]
    started: float
    is_durable: bool
    writer: str


class Catalog:
    """The names and refs of all objects, from the reports of writers and readers."""

    def __init__(self, rng: random.Random) -> None:
        self.is_closed = False
        """True if readers are told to stop."""
        self._rng = rng
        self._live: dict[str, Put] = {}
        self._puts: dict[str, Put] = {}
        self._made: dict[str, dict[str, Any]] = {}
        self._gone: set[str] = set()
        self._names: set[str] = set()
        self._scoped: dict[str, set[str]] = defaultdict(set)
        self._missing: list[dict[str, Any]] = []
        self._kills: list[float] = []

    def note(self, writer: str, kind: str, value: Any) -> None:
        """Note a report of a worker."""
        match kind:
            case "will":
                self._names.add(value)
            case "put":
                name = value["ref"]["name"]
                self._puts[name] = Put(value["ref"], value["started"], value["is_durable"], writer)
                self._live[name] = self._puts[name]
                self._gone.discard(name)
                if value["scope"] is not None:
                    self._scoped[writer].add(name)
            case "gone":
                self._gone.update(value)
                for name in value:
                    self._live.pop(name, None)
            case "made":
                if len(self._made) < MAX_MADE:
                    self._made[value["name"]] = value
            case "missing":
                self._missing.append(value)

    def node_killed(self) -> None:
        """Note that the node was killed: objects that are not durable and have no lineage are lost."""
        self._kills.append(time.monotonic())
        self._live = {name: put for name, put in self._live.items() if put.is_durable}

    def writer_ended(self, writer: str) -> list[str]:
        """Close the scopes of a dead writer with their objects. Return its other objects, which another process must
        release."""
        scoped = self._scoped.pop(writer, set())
        own = [name for name, put in self._live.items() if put.writer == writer and not put.is_durable]
        orphans = [name for name in own if name not in scoped]
        for name in (*scoped, *orphans):
            self._gone.add(name)
            self._live.pop(name, None)
        return orphans

    def pick(self, count: int) -> list[dict[str, Any]] | None:
        """Return refs for a reader: half of them put, half of them made. None means stop."""
        if self.is_closed:
            return None
        put = [item.ref for item in self._live.values()]
        made = list(self._made.values())
        pools = [pool for pool in (put, made) if pool]
        picked = [self._rng.choice(self._rng.choice(pools)) for _ in range(count)] if pools else []
        return list({ref["name"]: ref for ref in picked}.values())

    def judge(self) -> list[str]:
        """Return the objects that readers missed although nothing had removed them."""
        found = [text for missing in self._missing if (text := self._why(missing))]
        return [f"{len(found)} objects were missing", *found[:MAX_NAMED]] if found else []

    def durable(self) -> list[dict[str, Any]]:
        """Return the refs of every durable object that was not released."""
        return [put.ref for name, put in self._puts.items() if put.is_durable and name not in self._gone]

    def all_names(self) -> list[str]:
        """Return the names of all objects that may be on the node."""
        return sorted(self._names | set(self._made))

    def _why(self, missing: dict[str, Any]) -> str:
        name = missing["name"]
        put = self._puts.get(name)
        if name in self._gone:
            return ""
        if put is not None and not put.is_durable and any(put.started <= at <= missing["at"] for at in self._kills):
            return ""
        return f"{name} was missing at {missing['at']:.3f} (put: {put is not None}): {missing['text']}"
