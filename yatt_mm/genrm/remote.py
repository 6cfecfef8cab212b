"""A judge that is a server outside the run: asks it over HTTP with OpenAI's chat completions (e.g. `vllm serve`).

Consumes: `JudgeTask`s.
Produces: `JudgedGroup`s. Only this judge gets encoded media by value: it sends their bytes as data URLs.
Waits for: the data plane; and the server, at most `deadline_s` for a request, `max_outage_s` while it is away, and
`call_timeout_s` for a whole call. Unblocked by: their replies, the deadlines, or `cut_off`. Left out: Ray
(`remote_actor`), a single request (`chat_client`) and the waits for a server that is away (`server_waits`). Which
frames of a video the judge looks at is decided by the server.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dataplane.client.reader import Reader
from dataplane.core.lineage import source_ref
from dataplane.core.refs import Ref
from yatt_mm.common.errors import RewardError
from yatt_mm.common.media_refs import kind_of
from yatt_mm.common.traffic import Traffic
from yatt_mm.genrm.chat_client import ChatClient, ServerRefusesError, UnusableReplyError
from yatt_mm.genrm.chat_form import ChatReply, question_to, read_reply
from yatt_mm.genrm.server_waits import Asked, GaveUpError, ServerWaits, Tell
from yatt_mm.protocol import group_record
from yatt_mm.protocol.faults import MAX_SHOWN, Fault
from yatt_mm.protocol.genrm import MAX_WORDS_CHARS, JudgedGroup, JudgeSpec, JudgeTask, RemoteSpec
from yatt_mm.rollout.continuation import sample_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")

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

    def __init__(
        self,
        spec: JudgeSpec,
        server: RemoteSpec,
        reader: Reader,
        traffic: Traffic | None = None,
        *,
        tell: Tell = lambda record: None,
    ) -> None:
        """`traffic`: counts the bytes that the connections to the server move. `tell`: see `ServerWatch`.

        Raises OSError if the file with the server's key cannot be read.
        """
        self._spec = spec
        self._server = server
        self._reader = reader
        self._groups: set[asyncio.Task[JudgedGroup]] = set()
        api_key = None if server.api_key_file is None else Path(server.api_key_file).read_text().strip()
        self._client = ChatClient(spec.name, server, api_key=api_key, traffic=traffic)
        self._waits = ServerWaits(spec.name, server, self._client, max_attempts=spec.max_attempts, tell=tell)

    async def judge(self, tasks: Sequence[JudgeTask]) -> list[JudgedGroup | None]:
        """Return verdicts on the groups, in order; None for groups that `cut_off` ended.

        Raises RewardError if the server refuses every request, for example because of a wrong key.
        """
        by_s = asyncio.get_running_loop().time() + self._server.call_timeout_s
        groups = await _together((self._judge_group(task, by_s) for task in tasks), started=self._groups)
        return [None if group.cancelled() else group.result() for group in groups]

    def cut_off(self) -> None:
        """End the groups under way; `judge` returns None for them."""
        for group in self._groups:
            group.cancel()

    async def shutdown(self) -> None:
        """Close the connections to the server and to the data plane."""
        await self._client.close()
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
        votes = dict(zip(contents, await _all(calls), strict=True))
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
        return await _all(self._vote(content, sample_seed(seed, vote), by_s) for vote in range(self._spec.num_votes))

    async def _vote(self, content: list[dict[str, Any]], seed: int, by_s: float) -> _Verdict:
        """Ask for one verdict and return it. Ask again until it can be read, attempts are used up, or the deadline
        `by_s` is reached."""
        asked, num_tokens, score, said, why = Asked(), 0, None, "", ""
        try:
            async with asyncio.timeout_at(by_s):
                for attempt in range(self._spec.max_attempts):
                    try:
                        reply = await self._ask(content, sample_seed(seed, attempt), asked)
                    except UnusableReplyError as error:
                        why = str(error)
                        if error.is_final:
                            break
                        continue
                    num_tokens += reply.num_tokens
                    score, said = reply.score, self._client.shown(reply.said, MAX_WORDS_CHARS)
                    why = f"no verdict in its reply: {said[:MAX_SHOWN]!r}"
                    if score is not None or self._spec.is_repeatable:
                        break
        except GaveUpError as error:
            why = str(error)
        except TimeoutError:
            why = f"no verdict within {self._server.call_timeout_s:g} s" + (f": {asked.why}" if asked.why else "")
        except ServerRefusesError as error:
            raise RewardError(f"reward.judges.{self._spec.name}: {self._server.url}: {error}") from error
        if score is None:
            logger.warning("judge %s: no verdict after %d requests: %s", self._spec.name, asked.num_requests, why)
        return _Verdict(score=score, said=said, why=why, num_asked=asked.num_requests, num_tokens=num_tokens)

    async def _ask(self, content: list[dict[str, Any]], seed: int, asked: Asked) -> ChatReply:
        """Return the server's reply to one question. Raises UnusableReplyError, and the errors of `ServerWaits.ask`."""
        text = await self._waits.ask(question_to(self._server.model, self._spec, content, seed), asked)
        try:
            return read_reply(self._spec, text)
        except ValueError as error:
            raise UnusableReplyError(self._client.shown(str(error))) from None


async def _together(calls: Iterable[Coroutine[Any, Any, T]], *, started: set[asyncio.Task[T]]) -> list[asyncio.Task[T]]:
    """Run the calls at the same time, and return their tasks, which are in `started` until all have ended. The first
    failure cancels the others, and is raised."""
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(call) for call in calls]
            started.update(tasks)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    finally:
        started.difference_update(tasks)
    return tasks


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of the calls, which run at the same time. The first failure cancels the others."""
    return [task.result() for task in await _together(calls, started=set())]


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
