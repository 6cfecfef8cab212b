"""Puts what a judge wrote into the data plane, for the groups that are kept for people to read."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Sequence
from dataclasses import replace

from dataplane.client.client import Client
from yatt_mm.protocol.genrm import JudgedGroup, JudgeTask

MAX_CHARS = 4000
"""The number of characters of the text about one response that are kept."""


class KeptWords:
    """Stores texts of judges in the run's scope."""

    def __init__(self, client: Client, *, scope: str, durable: bool) -> None:
        """`durable`: True if the texts survive the death of the data plane's node."""
        self._client = client
        self._scope = scope
        self._durable = durable

    async def add(self, task: JudgeTask, judged: JudgedGroup, texts: Sequence[str]) -> JudgedGroup:
        """Return the verdicts with a ref to the texts, if those of the group are kept. `texts`: one per response."""
        if not task.keeps_words:
            return judged
        data = json.dumps([text[:MAX_CHARS] for text in texts]).encode()
        name = f"{task.group.ref.name}.words.{secrets.token_hex(8)}"  # a group may be judged more than once
        ref = await asyncio.to_thread(
            self._client.put, data, name=name, scope=self._scope, durable="unsynced" if self._durable else False
        )
        return replace(judged, words=ref)
