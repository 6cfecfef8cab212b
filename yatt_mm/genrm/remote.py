"""A judge that is a server outside the run: asks it over HTTP with OpenAI's chat completions (e.g. `vllm serve`).

Consumes: `JudgeTask`s.
Produces: `JudgedGroup`s. Only this judge gets encoded media by value: it sends their bytes as data URLs.
Waits for: the data plane; and the server, at most `deadline_s` for a request and `call_timeout_s` for a whole call.
Unblocked by: their replies, the deadlines, or `cut_off`. Left out: Ray (`remote_actor`). Which frames of a video the
judge looks at is decided by the server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from dataplane.client.reader import Reader
from dataplane.core.lineage import source_ref
from dataplane.core.refs import Ref
from yatt_mm.common.media_refs import kind_of
from yatt_mm.genrm.traffic import Traffic
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import MAX_SHOWN, Fault
from yatt_mm.protocol.genrm import MAX_WORDS_CHARS, JudgedGroup, JudgeSpec, JudgeTask, RemoteSpec
from yatt_mm.protocol.verdicts import MAX_WORDS, LabelScore, YesNo
from yatt_mm.rollout.continuation import sample_seed

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
"""The seconds between the first attempt and the second; each later pause is twice as long."""
MAX_ERROR_CHARS = 200
"""The number of characters of a server's error that are logged."""
MAX_REPORTED_TOKENS = 10**7
"""The largest number of tokens that a server may report for one reply. Larger numbers are wrong and count as 0."""
MIME_TYPES = (
    (re.compile(rb"\x89PNG"), "image/png"),
    (re.compile(rb"\xff\xd8"), "image/jpeg"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "image/webp"),
    (re.compile(rb"GIF8"), "image/gif"),
    (re.compile(rb"....ftyp", re.DOTALL), "video/mp4"),
    (re.compile(rb"\x1a\x45\xdf\xa3"), "video/webm"),
)
"""(pattern of the first bytes, MIME type) of the encodings that servers accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """A server's reply to one request."""

    score: float | None
    """None if the reply contains no verdict."""
    said: str
    """The beginning of the reply."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """The result of asking for one verdict, with all its attempts."""

    score: float | None = None
    said: str = ""
    """The beginning of the last reply."""
    why: str = ""
    """Why there is no score."""
    num_asked: int
    num_tokens: int = 0


class RemoteJudge:
    """A judge on a server, with a connection to the data plane. Use it only in the event loop that made it."""

    def __init__(self, spec: JudgeSpec, server: RemoteSpec, reader: Reader, traffic: Traffic | None = None) -> None:
        """`traffic`: counts the bytes that the connections to the server move."""
        self._spec = spec
        self._server = server
        self._reader = reader
        self._under_way = asyncio.Semaphore(server.max_requests)
        self._groups: set[asyncio.Task[JudgedGroup]] = set()
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=server.deadline_s),
            connector=_CountedConnector(traffic or Traffic(), limit=server.max_requests),
            headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else None,
        )

    async def judge(self, tasks: Sequence[JudgeTask]) -> list[JudgedGroup | None]:
        """Return verdicts on the groups, in order; None for groups that `cut_off` ended."""
        by_s = asyncio.get_running_loop().time() + self._server.call_timeout_s
        groups = [asyncio.create_task(self._judge_group(task, by_s)) for task in tasks]
        self._groups.update(groups)
        try:
            await asyncio.gather(*groups, return_exceptions=True)
        finally:
            self._groups.difference_update(groups)
        return [None if group.cancelled() else group.result() for group in groups]

    def cut_off(self) -> None:
        """End the groups under way; `judge` returns None for them."""
        for group in self._groups:
            group.cancel()

    async def shutdown(self) -> None:
        """Close the connections to the server and to the data plane."""
        await self._session.close()
        self._reader.close()

    async def _judge_group(self, task: JudgeTask, by_s: float) -> JudgedGroup:
        """Return verdicts on one group. `by_s`: deadline for all of them, on the event loop's clock."""
        (view,) = await asyncio.to_thread(self._reader.resolve, [task.group.ref])
        texts = [sample.text for sample in group_record.decode(view).samples]
        # Responses with the same key share one question to the server.
        keys: list[object] = [*texts] if self._spec.is_repeatable else [*range(len(texts))]
        try:
            media = await asyncio.to_thread(self._media, task.group.media)
            contents = {key: self._content(task, text, media) for key, text in zip(keys, texts)}
            why = ""
        except ValueError as error:
            why = str(error)
            logger.warning(
                "judge %s cannot be asked about the responses in %s: %s", self._spec.name, task.group.ref, error
            )
            contents = {}
        seeds = {key: sample_seed(task.seed, keys.index(key)) for key in contents}
        calls = (self._votes(content, seeds[key], by_s) for key, content in contents.items())
        votes = dict(zip(contents, await asyncio.gather(*calls), strict=True))
        read = {key: [vote.score for vote in of_one if vote.score is not None] for key, of_one in votes.items()}
        failed = [place for place, key in enumerate(keys) if not read.get(key)]
        fault = None
        if failed:
            key, response = keys[failed[0]], texts[failed[0]][:MAX_SHOWN]
            why = why or votes[key][0].why
            fault = Fault(what=why, where=f"{self._server.model} at {self._server.url}", response=response)
        said = tuple("\n\n".join(vote.said for vote in votes.get(key, ()))[:MAX_WORDS_CHARS] for key in keys)
        return JudgedGroup(
            fault=fault,
            scores=tuple(self._spec.score_of(read.get(key, ())) for key in keys),
            num_retried=sum(max(0, vote.num_asked - 1) for of_one in votes.values() for vote in of_one),
            num_failed=len(failed),
            num_tokens=sum(vote.num_tokens for of_one in votes.values() for vote in of_one),
            words=said if task.keeps_words else None,
        )

    def _media(self, refs: Sequence[Ref]) -> list[dict[str, Any]]:
        """Return the encoded media as parts of a message. Raises ValueError if a server could not read one of them."""
        views = self._reader.resolve([_source_of(ref) for ref in refs]) if refs else ()
        return [_part(view.tobytes()) for view in views]

    def _content(self, task: JudgeTask, response: str, media: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the content of the message about one response.

        Raises ValueError if the sample lacks a field that the template names, or if its media are others than those of
        the question.
        """
        asked = self._spec.template.fill(
            question=task.question, response=_defused(response), answer=task.answer, fields=task.fields
        )
        kinds = tuple(map(kind_of, task.group.media))
        if asked.kinds != kinds:
            raise ValueError(f"the judge's text has places for media of {asked.kinds}, and the media are {kinds}")
        (turn,), left = asked.turns, iter(media)
        return [next(left) if part.is_medium else {"type": "text", "text": part.text} for part in turn.parts]

    async def _votes(self, content: list[dict[str, Any]], seed: int, by_s: float) -> list[_Verdict]:
        """Return all votes on one response."""
        votes = (self._vote(content, sample_seed(seed, vote), by_s) for vote in range(self._spec.num_votes))
        return list(await asyncio.gather(*votes))

    async def _vote(self, content: list[dict[str, Any]], seed: int, by_s: float) -> _Verdict:
        """Ask for one verdict and return it. Ask again until it can be read, attempts are used up, or the deadline
        `by_s` is reached."""
        num_asked, num_tokens, said, why = 0, 0, "", ""
        try:
            async with asyncio.timeout_at(by_s):
                for attempt in range(self._spec.max_attempts):
                    if attempt:
                        await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
                    async with self._under_way:
                        num_asked += 1
                        reply = await self._ask(content, sample_seed(seed, attempt), num_asked)
                    if isinstance(reply, str):
                        why = reply
                        continue
                    num_tokens += reply.num_tokens
                    said, why = reply.said, f"no verdict in its reply: {reply.said[:MAX_SHOWN]!r}"
                    if reply.score is not None or self._spec.is_repeatable:
                        score = reply.score
                        return _Verdict(score=score, said=said, why=why, num_asked=num_asked, num_tokens=num_tokens)
        except TimeoutError:
            why = f"no verdict within {self._server.call_timeout_s:g} s"
            self._note_failure(num_asked, why)
        return _Verdict(said=said, why=why, num_asked=num_asked, num_tokens=num_tokens)

    async def _ask(self, content: list[dict[str, Any]], seed: int, num_asked: int) -> _Reply | str:
        """Return the server's reply; or why there was none in time, or not a usable one."""
        try:
            return self._read(await self._chat(content, seed))
        except (aiohttp.ClientError, TimeoutError, _ReplyError) as error:
            why = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            self._note_failure(num_asked, why)
            return why

    def _note_failure(self, num_asked: int, what: str) -> None:
        logger.warning("judge %s at %s, attempt %d: %s", self._spec.name, self._server.url, num_asked, what)

    async def _chat(self, content: list[dict[str, Any]], seed: int) -> str:
        """Send one request and return the body of the reply. Raises _ReplyError if its status is not 200."""
        body: dict[str, Any] = {
            "model": self._server.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self._spec.max_tokens,
            "temperature": self._spec.temperature,
            "seed": seed,
        }
        if isinstance(self._spec.verdict, YesNo):
            # temperature 1 leaves the distribution unchanged; words that are missing in the reply count as impossible
            body |= {"max_tokens": 1, "temperature": 1.0, "logprobs": True, "top_logprobs": MAX_WORDS}
        async with self._session.post(f"{self._server.url.rstrip('/')}/chat/completions", json=body) as response:
            if response.status != 200:
                raise _ReplyError(f"status {response.status}: {await response.text('utf-8', errors='replace')}")
            return await response.text("utf-8", errors="replace")

    def _read(self, text: str) -> _Reply:
        """Return the content of a server's reply. Raises _ReplyError if it is not a chat completion."""
        try:
            chat = json.loads(text)
            choice = chat["choices"][0]
            message = choice.get("message")
            said = str(message.get("content") if isinstance(message, dict) else "")[:MAX_WORDS_CHARS]
            return _Reply(score=self._score(choice), said=said, num_tokens=_num_tokens(chat))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _ReplyError(f"not a chat completion: {text}") from error

    def _score(self, choice: dict[str, Any]) -> float | None:
        """Return the score of a reply's first choice; None if it contains no verdict."""
        verdict = self._spec.verdict
        assert not isinstance(verdict, LabelScore), "the config refuses LabelScore with a url"
        if not isinstance(verdict, YesNo):
            return verdict.score(choice["message"]["content"] or "")
        tokens = (choice.get("logprobs") or {}).get("content") or []
        tops = (tokens[0].get("top_logprobs") or []) if tokens else []
        likeliest = {top["token"]: float(top["logprob"]) for top in tops}
        yes, no = ([likeliest.get(word, -math.inf) for word in words] for words in (verdict.yes, verdict.no))
        return verdict.score(yes, no)


class _CountedConnector(aiohttp.TCPConnector):
    """A connector that counts a connection's traffic whenever a request releases the connection, because it may be
    closed next."""

    def __init__(self, traffic: Traffic, **settings: Any) -> None:
        super().__init__(**settings)
        self._traffic = traffic

    def _release(self, key: Any, protocol: Any, *, should_close: bool = False) -> None:
        transport = protocol.transport
        connection = None if transport is None else transport.get_extra_info("socket")
        if connection is not None:  # None: the server closed it without a reply
            self._traffic.look_at(connection.fileno())
        super()._release(key, protocol, should_close=should_close)


class _ReplyError(Exception):
    """The server replied, but not with a chat completion."""


def _num_tokens(chat: dict[str, Any]) -> int:
    """Return the number of tokens that the server reports for its reply; 0 if the number is missing or impossible."""
    usage = chat.get("usage")
    number = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return number if isinstance(number, int) and 0 <= number <= MAX_REPORTED_TOKENS else 0


def _source_of(ref: Ref) -> Ref:
    """Return the ref of the encoded medium from which patches were derived. Raises ValueError without a lineage."""
    if ref.lineage is None:
        raise ValueError(
            f"ref {ref.name} ({ref.kind}) has no lineage; a remote judge needs the encoded medium: send a derived ref"
        )
    return source_ref(ref.lineage, ref.node)


def _defused(response: str) -> str:
    """Return the response with the opening of most models' special tokens broken up.

    The special tokens of the server's model are not known here.
    """
    return response.replace("<|", "< |")


def _part(encoded: bytes) -> dict[str, Any]:
    """Return one part of a message: an image, or a video in the form of vLLM's server."""
    mime = next((mime for pattern, mime in MIME_TYPES if pattern.match(encoded)), None)
    if mime is None:
        raise ValueError(
            f"a medium begins with {encoded[:12]!r}; a judge's server accepts {', '.join(m for _, m in MIME_TYPES)}: "
            "convert the medium"
        )
    key = f"{mime.split('/')[0]}_url"
    return {"type": key, key: {"url": f"data:{mime};base64,{base64.b64encode(encoded).decode()}"}}
