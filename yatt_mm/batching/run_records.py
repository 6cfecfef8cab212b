"""The records that controllers hand to the launcher, and why samples were left out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from yatt_mm.common.errors import DataError
from yatt_mm.common.reasons import Reasons

TOLD_ONCE = ("quarantine", "skipped", "failure")
"""The kinds of records that come again after a fault, because their step is repeated."""


class RunRecords:
    """Takes records from controllers, and keeps them until the launcher takes them."""

    def __init__(self) -> None:
        self._records: list[dict[str, Any]] = []
        self._news = asyncio.Event()
        self._reasons = Reasons()
        """Why samples were left out: they cannot be used, or `data.filter` leaves them out."""
        self._notices: set[frozenset[tuple[str, Any]]] = set()
        """What was taken of the kinds `TOLD_ONCE`, without the step: a sample may be found in another one."""

    def put(self, record: dict[str, Any]) -> bool:
        """Take a record. Return False for a notice that was taken before: after a fault it comes again."""
        if record["kind"] in TOLD_ONCE:
            notice = frozenset((name, value) for name, value in record.items() if name != "step")
            if notice in self._notices:
                return False
            self._notices.add(notice)
        if record["kind"] == "quarantine":
            self._reasons.add(record["reason"])
        self._records.append(record)
        self._news.set()
        return True

    async def take(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the records since the last call. Waits up to `timeout_s` for the first one."""
        if not self._records:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), timeout_s)
        records, self._records = self._records, []
        return records

    def why_left_out(self) -> str:
        """Return why samples were left out, as the end of an error's message; empty if none was."""
        if not self._reasons:
            return ""
        reason, count = self._reasons.commonest()
        num = len(self._reasons)
        return f". {num} samples were left out (quarantine.jsonl has all), {count} of them because: {reason}"

    @contextlib.contextmanager
    def says_why(self) -> Iterator[None]:
        """Add to an error of the data, for a block, why samples were left out."""
        try:
            yield
        except DataError as error:
            raise DataError(f"{error}{self.why_left_out()}") from None
