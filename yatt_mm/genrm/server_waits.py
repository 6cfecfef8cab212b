"""Asks a judge's server again while it is away, and tells when it is away and when it is back.

Consumes: questions in the form of chat completions. Produces: the texts of the replies.
Waits for: the server, at most `max_outage_s` from the moment since which it is away. Unblocked by: its reply, or that
limit. The waits between two requests for one verdict double, and are drawn at random, so that the requests do not come
back all at once (exponential backoff with jitter: AWS Architecture Blog, "Exponential Backoff And Jitter", 2015).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from yatt_mm.genrm.chat_client import ChatClient, ServerAwayError, ServerRefusesError, UnusableReplyError
from yatt_mm.protocol.genrm import RemoteSpec

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""The longest wait after the first failure, in seconds; each later one may be twice as long."""
LONGEST_PAUSE_S = 15.0
TELL_AFTER_S = 3.0
"""The seconds without any reply from which on people are told that a server is away."""
Tell = Callable[[dict[str, Any]], object]
"""Hands a record over to those who show it. See `ServerWatch`."""


@dataclass(slots=True)
class Asked:
    """What was done for one verdict so far."""

    num_requests: int = 0
    why: str = ""
    """What was wrong with the last request; empty if nothing was."""


class GaveUpError(Exception):
    """The server was away for too long, or gave no reply to one request while it replied to others."""


class ServerWatch:
    """Whether a server replies to anything. It tells once that the server is away, and once that it is back."""

    def __init__(self, judge: str, server: RemoteSpec, tell: Tell) -> None:
        """`tell` gets the records of kind `server`: the judge, `is_away`, and a text for people."""
        self._who = f"the server of judge {judge} at {server.url}"
        self._judge = judge
        self._server = server
        self._tell = tell
        self._replied_s = float("-inf")
        """The time of the last reply of any kind."""
        self.away_since_s: float | None = None
        """The time since which the server gave no reply; None while it gives some."""
        self._is_told = False

    def has_replied_since(self, moment_s: float) -> bool:
        """Return True if some request got a reply after this time (of `time.monotonic`)."""
        return self._replied_s > moment_s

    def note_reply(self) -> None:
        """Note that a request got a reply."""
        self._replied_s = time.monotonic()
        since, self.away_since_s = self.away_since_s, None
        if since is not None and self._is_told:
            self._is_told = False
            self._say(False, f"{self._who} replies again, after {self._replied_s - since:.0f} s")

    def note_failure(self, *, sent_s: float) -> None:
        """Note that a request that was sent at this time got no reply."""
        if self.away_since_s is None and not self.has_replied_since(sent_s):
            self.away_since_s = sent_s

    def tell_if_away(self, why: str, *, until_s: float) -> None:
        """Tell, if that was not told yet, that the server will be away at this time for longer than `TELL_AFTER_S`."""
        if self._is_told or self.away_since_s is None or until_s - self.away_since_s < TELL_AFTER_S:
            return
        self._is_told = True
        self._say(
            True,
            f"{self._who} gives no reply ({why}); its verdicts are waited for up to {self._server.max_outage_s:g} s "
            f"(reward.judges.{self._judge}.max_outage_s)",
        )

    def _say(self, is_away: bool, text: str) -> None:
        logger.warning(text)
        self._tell({"kind": "server", "judge": self._judge, "is_away": is_away, "text": text})


class ServerWaits:
    """Asks one server, and waits while it is away. Use it only in the event loop of its client."""

    def __init__(
        self, judge: str, server: RemoteSpec, client: ChatClient, *, max_attempts: int, tell: Tell = lambda record: None
    ) -> None:
        """`max_attempts`: the most requests for one reply that fail while the server replies to other requests."""
        self._server = server
        self._client = client
        self._max_attempts = max_attempts
        self._watch = ServerWatch(judge, server, tell)
        self._under_way = asyncio.Semaphore(server.max_requests)

    async def ask(self, body: Mapping[str, Any], asked: Asked) -> str:
        """Return the text of the reply to one question. Counts in `asked`.

        Raises:
            GaveUpError: the server was away for too long.
            ServerRefusesError, UnusableReplyError: see `ChatClient.chat`.
        """
        first_s, num_own = float("inf"), 0
        for num_failed in itertools.count(1):
            async with self._under_way:
                asked.num_requests += 1
                sent_s = time.monotonic()
                try:
                    return await self._replied(body)
                except ServerAwayError as error:
                    away = error
            asked.why = str(away)
            first_s = min(first_s, sent_s)
            self._watch.note_failure(sent_s=sent_s)
            num_own += away.may_be_request and self._watch.has_replied_since(sent_s)
            if num_own >= self._max_attempts:
                raise GaveUpError(f"{away}, although the server replied to other requests")
            now = time.monotonic()
            left_s = min(first_s, self._watch.away_since_s or first_s) + self._server.max_outage_s - now
            if left_s <= 0:
                raise GaveUpError(f"{away}; the server was away for {self._server.max_outage_s:g} s")
            wait_s = min(max(pause_s(num_failed), away.retry_after_s), left_s)
            self._watch.tell_if_away(str(away), until_s=now + wait_s)
            await asyncio.sleep(wait_s)
        raise AssertionError("the loop ends by itself only")

    async def _replied(self, body: Mapping[str, Any]) -> str:
        """Return the reply to one request, and note if there was one."""
        try:
            text = await self._client.chat(body)
        except (ServerRefusesError, UnusableReplyError):
            self._watch.note_reply()
            raise
        self._watch.note_reply()
        return text


def pause_s(num_failed: int) -> float:
    """Return the seconds to wait after this number of failures in a row: between half of the longest wait and the
    whole."""
    longest_s = min(FIRST_PAUSE_S * 2 ** min(num_failed - 1, 30), LONGEST_PAUSE_S)
    return longest_s * random.uniform(0.5, 1.0)
