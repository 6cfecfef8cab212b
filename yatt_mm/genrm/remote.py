"""The body of a judge that is somebody else's server: OpenAI's chat completions over HTTP (`vllm serve`, for one).

Consumes: `JudgeTask`s.  Produces: `JudgedGroup`s.  Here alone do media travel: their encoded bytes, as data URLs.
Waits for: the data plane, and the server for `deadline_s` per request.  Unblocked by: their answers, or the deadline.
Left out: Ray (`remote_actor`), videos.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from dataplane.lineages import source_ref
from dataplane.reader import Reader
from dataplane.refs import Ref
from yatt_mm.genrm.messages import JudgedGroup, JudgeSpec, JudgeTask, RemoteSpec
from yatt_mm.genrm.verdicts import LabelScore, YesNo
from yatt_mm.rollout import record
from yatt_mm.rollout.attempt import sample_seed

logger = logging.getLogger(__name__)

NUM_TOP_LOGPROBS = 20
"""As many as the protocol allows; words that are not among them count as impossible."""
FIRST_PAUSE_S = 0.5
"""Before a request is sent again; doubled each time."""
MAX_ERROR_CHARS = 200
MIME_TYPES = ((b"\x89PNG", "image/png"), (b"\xff\xd8", "image/jpeg"), (b"RIFF", "image/webp"), (b"GIF8", "image/gif"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    score: float | None
    num_asked: int


class RemoteJudge:
    """A server's address, and a connection to the data plane. Belongs to the event loop that made it."""

    def __init__(self, spec: JudgeSpec, server: RemoteSpec, reader: Reader) -> None:
        self._spec = spec
        self._server = server
        self._reader = reader
        self._under_way = asyncio.Semaphore(server.max_requests)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=server.deadline_s),
            connector=aiohttp.TCPConnector(limit=server.max_requests),
        )

    async def judge(self, tasks: Sequence[JudgeTask]) -> list[JudgedGroup | None]:
        """Verdicts on the groups, in order; never None, since a server does not sleep."""
        return list(await asyncio.gather(*(self._judge_group(task) for task in tasks)))

    async def shutdown(self) -> None:
        """Close the connections."""
        await self._session.close()
        self._reader.close()

    async def _judge_group(self, task: JudgeTask) -> JudgedGroup:
        sources = [_source_of(ref) for ref in task.group.media]
        view, *media = await asyncio.to_thread(self._reader.resolve, [task.group.ref, *sources])
        images = [{"type": "image_url", "image_url": {"url": _data_url(medium.tobytes())}} for medium in media]
        del media  # and its leases
        texts = [sample.text for sample in record.decode(view).samples]
        answers = await asyncio.gather(*(self._votes(task, images, text, i) for i, text in enumerate(texts)))
        scores = [[vote.score for vote in votes if vote.score is not None] for votes in answers]
        return JudgedGroup(
            scores=tuple(self._spec.score_of(of_one) for of_one in scores),
            num_retried=sum(vote.num_asked - 1 for votes in answers for vote in votes),
            num_failed=sum(not of_one for of_one in scores),
        )

    async def _votes(self, task: JudgeTask, images: list[dict[str, Any]], response: str, place: int) -> list[_Verdict]:
        text = self._spec.template.fill(
            question=task.question, response=_defused(response), answer=task.answer, fields=task.fields
        )
        content = [*images, {"type": "text", "text": text}]
        seed = sample_seed(task.seed, place)
        votes = (self._vote(content, sample_seed(seed, vote)) for vote in range(self._spec.num_votes))
        return list(await asyncio.gather(*votes))

    async def _vote(self, content: list[dict[str, Any]], seed: int) -> _Verdict:
        attempts = self._spec.max_attempts
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with self._under_way:
                    choice = await self._ask(content, sample_seed(seed, attempt))
            except (aiohttp.ClientError, TimeoutError, _AnswerError) as error:
                what = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
                logger.warning("judge %s at %s, attempt %d: %s", self._spec.name, self._server.url, attempt + 1, what)
                continue
            score = self._read(choice)
            if score is not None or self._spec.is_sure:
                return _Verdict(score=score, num_asked=attempt + 1)
        return _Verdict(score=None, num_asked=attempts)

    async def _ask(self, content: list[dict[str, Any]], seed: int) -> dict[str, Any]:
        """The first choice of the server's answer."""
        body: dict[str, Any] = {
            "model": self._server.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._spec.max_tokens,
            "temperature": self._spec.temperature,
            "seed": seed,
        }
        if isinstance(self._spec.verdict, YesNo):  # the distribution as it is, whatever the temperature
            body |= {"max_tokens": 1, "temperature": 1.0, "logprobs": True, "top_logprobs": NUM_TOP_LOGPROBS}
        async with self._session.post(f"{self._server.url.rstrip('/')}/chat/completions", json=body) as response:
            if response.status != 200:
                raise _AnswerError(f"status {response.status}: {await response.text()}")
            text = await response.text()
        try:
            choice: dict[str, Any] = json.loads(text)["choices"][0]
            choice["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise _AnswerError(f"not a chat completion: {text}") from error
        return choice

    def _read(self, choice: dict[str, Any]) -> float | None:
        verdict = self._spec.verdict
        assert not isinstance(verdict, LabelScore), "refused with a url"
        if not isinstance(verdict, YesNo):
            return verdict.score(choice["message"]["content"] or "")
        tokens = (choice.get("logprobs") or {}).get("content") or []
        tops = (tokens[0].get("top_logprobs") or []) if tokens else []
        likeliest = {top["token"]: float(top["logprob"]) for top in tops}
        yes, no = ([likeliest.get(word, -math.inf) for word in words] for words in (verdict.yes, verdict.no))
        return verdict.score(yes, no)


class _AnswerError(Exception):
    """The server answered, but not what was asked."""


def _source_of(ref: Ref) -> Ref:
    """The encoded medium that patches were made of."""
    if ref.lineage is None:
        raise ValueError(f"ref {ref.name} ({ref.kind}) has no lineage; a remote judge is sent encoded media")
    return source_ref(ref.lineage, ref.node)


def _defused(response: str) -> str:
    """What opens most models' special tokens is broken up; the server's own are not known here."""
    return response.replace("<|", "< |")


def _data_url(encoded: bytes) -> str:
    mime = next((mime for begin, mime in MIME_TYPES if encoded.startswith(begin)), None)
    if mime is None:
        raise ValueError(
            f"a medium begins with {encoded[:4]!r}; a remote judge is sent PNG, JPEG, WebP and GIF images: convert it"
        )
    return f"data:{mime};base64,{base64.b64encode(encoded).decode()}"
