"""One engine with continuous batching, in virtual time.

All sequences of an engine gain one token per decode step, and a step takes `fixed + per_sequence * n` seconds. So the
engine keeps one number, the tokens that each sequence has gained since the start; a sequence ends when that number
reaches a mark, and nothing is computed between two events. Prefill and vision stall decoding (no chunked prefill).
A sequence reserves room in the key-value cache for all it will have; a real engine admits more and sometimes preempts.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field

from yatt_mm.placement.policy import FULL_SLOWDOWN
from yatt_mm.simulator.config import EngineSection

EPSILON = 1e-6
"""The tolerance for rounding, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """An engine's part of the config as plain numbers, because they are read at every event."""

    decode_fixed_s: float
    decode_per_sequence_s: float
    prefill_per_token_s: float
    vision_per_patch_s: float
    request_s: float
    max_num_seqs: int
    kv_tokens: float

    @classmethod
    def of(cls, section: EngineSection) -> Speed:
        """Return the speed that a section of the config describes."""
        return cls(
            decode_fixed_s=section.decode_fixed_s.value,
            decode_per_sequence_s=section.decode_per_sequence_s.value,
            prefill_per_token_s=section.prefill_per_token_s.value,
            vision_per_patch_s=section.vision_per_patch_s.value,
            request_s=section.request_s.value,
            max_num_seqs=section.max_num_seqs,
            kv_tokens=section.kv_tokens.value,
        )

    @property
    def knee(self) -> float:
        """The number of sequences at which a decode step takes `FULL_SLOWDOWN` times as long as with none."""
        most = float(self.max_num_seqs)
        if self.decode_per_sequence_s == 0:
            return most
        return max(1.0, min(most, (FULL_SLOWDOWN - 1) * self.decode_fixed_s / self.decode_per_sequence_s))


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A sequence to be sampled."""

    group: int
    """The position of its prompt."""
    sample: int
    """The number of the response in its group."""
    num_left: float
    """The number of tokens still to be sampled."""
    num_done: float = 0.0
    """The number of tokens sampled before the request was cut off at another engine; they are prefilled again."""
    prefixes: tuple[tuple[Hashable, float, float], ...]
    """(name, tokens, patches) of its prompt's parts. An engine that holds a part does not compute it again."""
    is_over: bool = False
    num_reserved: float = field(init=False)
    """The tokens of the key-value cache that it needs at its end."""

    def __post_init__(self) -> None:
        self.num_reserved = sum(tokens for _, tokens, _ in self.prefixes) + self.num_done + self.num_left


@dataclass(slots=True, eq=False)
class ModelledEngine:
    """The model of one awake engine: which sequences it computes, and when each ends."""

    speed: Speed
    clock_s: float = 0.0
    """The simulated time in seconds up to which the state of the engine is computed."""
    active_s: float = 0.0
    """The seconds with at least one request, so far."""
    filled_s: float = 0.0
    """The same seconds, where decoding fewer sequences than the knee counts in proportion."""
    version: int = 0
    """A counter of changes. A planned event of an older version is ignored."""
    _tokens: float = 0.0
    _stalled_until_s: float = 0.0
    _reserved: float = 0.0
    _heap: list[tuple[float, int, Request]] = field(default_factory=list)
    _prefixes: set[Hashable] = field(default_factory=set)
    _num_added: int = 0
    _knee: float = field(init=False)

    def __post_init__(self) -> None:
        self._knee = self.speed.knee

    @property
    def num_running(self) -> int:
        """The number of sequences at work."""
        return len(self._heap)

    def has_room(self, request: Request) -> bool:
        """Return True if the request could start now."""
        speed = self.speed
        return len(self._heap) < speed.max_num_seqs and self._reserved + request.num_reserved <= speed.kv_tokens

    def add(self, request: Request, now_s: float) -> None:
        """Start a sequence."""
        if now_s > self.clock_s:
            self.advance(now_s)
        speed = self.speed
        seconds = speed.request_s + request.num_done * speed.prefill_per_token_s
        for name, tokens, patches in request.prefixes:
            if name not in self._prefixes:
                self._prefixes.add(name)
                seconds += tokens * speed.prefill_per_token_s + patches * speed.vision_per_patch_s
        self._stalled_until_s = max(self._stalled_until_s, now_s) + seconds
        self._reserved += request.num_reserved
        self._num_added += 1
        heapq.heappush(self._heap, (self._tokens + request.num_left, self._num_added, request))
        self.version += 1

    def pause(self, now_s: float, seconds: float) -> None:
        """Stop for this time, while weights are exchanged."""
        self.advance(now_s)
        self._stalled_until_s = max(self._stalled_until_s, now_s) + seconds
        self.version += 1

    def next_end_s(self) -> float | None:
        """Return when the next sequence ends if nothing changes; None when there is none."""
        if not self._heap:
            return None
        decode_s = max(0.0, self._heap[0][0] - self._tokens) * self._step_s()
        return max(self.clock_s, self._stalled_until_s) + decode_s

    def pop_ended(self, now_s: float) -> list[Request]:
        """Remove and return the sequences that end first, all at the same time. There is at least one, even if rounding
        puts its end just after `now_s`."""
        self.advance(now_s)
        ended: list[Request] = []
        while self._heap and (not ended or self._heap[0][0] <= self._tokens + EPSILON):
            request = heapq.heappop(self._heap)[2]
            self._reserved -= request.num_reserved
            request.num_done, request.num_left = request.num_done + request.num_left, 0.0
            ended.append(request)
        self.version += 1
        return ended

    def drain(self, now_s: float) -> list[Request]:
        """Cut off all sequences, and return their requests. The sequences keep their tokens."""
        self.advance(now_s)
        cut = []
        for end, _, request in sorted(self._heap, key=lambda entry: entry[1]):
            left = min(request.num_left, max(EPSILON, end - self._tokens))
            request.num_done += request.num_left - left
            request.num_left = left
            cut.append(request)
        self._heap, self._reserved = [], 0.0
        self._stalled_until_s = now_s
        self._prefixes.clear()
        self.version += 1
        return cut

    def drop(self, is_dropped: set[int], now_s: float) -> int:
        """Abort the sequences of some groups; return how many there were."""
        self.advance(now_s)
        kept = [entry for entry in self._heap if entry[2].group not in is_dropped]
        num_dropped = len(self._heap) - len(kept)
        if num_dropped:
            self._heap = kept
            heapq.heapify(self._heap)
            self._reserved = sum(entry[2].num_reserved for entry in kept)
            self.version += 1
        return num_dropped

    def advance(self, now_s: float) -> None:
        """Advance the state to a time."""
        if now_s <= self.clock_s:
            return
        if self._heap:
            start_s = min(max(self.clock_s, self._stalled_until_s), now_s)
            decode_s = now_s - start_s
            self._tokens += decode_s / self._step_s()
            self.active_s += now_s - self.clock_s
            self.filled_s += start_s - self.clock_s + decode_s * min(1.0, len(self._heap) / self._knee)
        self.clock_s = now_s

    def _step_s(self) -> float:
        return self.speed.decode_fixed_s + self.speed.decode_per_sequence_s * len(self._heap)
