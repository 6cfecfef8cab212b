"""One request to a server that speaks OpenAI's chat completions, with a limit of time and of bytes.

What goes wrong is one of three errors: the server must be asked later (`ServerAwayError`), the user must change
something (`ServerRefusesError`), or only this reply is of no use (`UnusableReplyError`).

Waits for: the server, at most `deadline_s`. Unblocked by: its reply, or the deadline. Left out: what is asked and what
a reply means (`chat_form`), and asking again (`server_waits`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from yatt_mm.common.traffic import Traffic
from yatt_mm.protocol.faults import MAX_SHOWN
from yatt_mm.protocol.genrm import RemoteSpec

MAX_REPLY_BYTES = 2 * 2**20
"""The longest reply that is read. A thousand tokens of text take about 5 KiB."""
MAX_ERROR_BYTES = 2**16
"""The bytes that are read of the body of a reply with another status than 200."""
ERROR_BODY_S = 5.0
"""The time that such a body may take, in seconds; what came until then is shown."""
LATER = (408, 425, 429)
"""The statuses below 500 that ask for the same request at a later time."""
OF_REQUEST = (400, 413, 422)
"""The statuses that are about one request: another one may be accepted."""
MIN_KEY_CHARS = 8
"""The shortest key that is hidden in a server's words. Shorter ones are words such as EMPTY, which open nothing."""
HIDDEN = "(the key)"
MAX_RETRY_AFTER_S = 86400.0


class ServerAwayError(Exception):
    """The server takes no connection, breaks it off, does not reply in time, or asks to be asked later."""

    def __init__(self, why: str, *, retry_after_s: float = 0.0, may_be_request: bool = False) -> None:
        """`retry_after_s`: the shortest wait that the server asks for. `may_be_request`: True if this request may be
        the reason, and not the server."""
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.may_be_request = may_be_request


class ServerRefusesError(Exception):
    """The server refuses this request and will refuse every other one."""

    def __init__(self, found: str, change: str, *, status: int | None = None) -> None:
        """`found`: what the server said. `change`: what the user must change. `status`: None where there was no reply,
        because the server's certificate is not trusted."""
        super().__init__(f"{found}; {change}")
        self.found = found
        self.change = change
        self.status = status


class UnusableReplyError(Exception):
    """The server replied to this request, but not with a chat completion."""

    def __init__(self, why: str, *, is_final: bool = False) -> None:
        """`is_final`: True if the same request would get the same reply."""
        super().__init__(why)
        self.is_final = is_final


class ChatClient:
    """The connections to one server. Use it only in the event loop that made it, and close it."""

    def __init__(
        self, judge: str, server: RemoteSpec, *, api_key: str | None = None, traffic: Traffic | None = None
    ) -> None:
        """`judge`: the judge's name, for messages. `api_key`: sent with every request; no message contains it.
        `traffic` counts the bytes that the connections move."""
        self._judge = judge
        self._server = server
        self._url = server.url.rstrip("/")
        self._secrets = _forms_of(api_key)
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            connector=_CountedConnector(traffic or Traffic(), limit=server.max_requests),
            # a compressed reply could become much larger than what was received
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
            auto_decompress=False,
        )

    async def chat(self, body: Mapping[str, Any]) -> str:
        """Send one request for a chat completion and return the text of the reply.

        Raises:
            ServerAwayError: it is to be asked again later.
            ServerRefusesError: it will refuse every request.
            UnusableReplyError: it refuses this request, or its reply is longer than `MAX_REPLY_BYTES`.
        """
        return await self._request("POST", "chat/completions", json=body)

    async def models(self) -> list[str]:
        """Return the names of the models that the server says it has; none if it does not say so.

        Raises: the errors of `chat`.
        """
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return [str(model["id"]) for model in json.loads(await self._request("GET", "models"))["data"]]
        return []

    def shown(self, text: str, max_chars: int = MAX_SHOWN) -> str:
        """Return the beginning of a text that came from the server, without the key."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return text[:max_chars]

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _request(self, method: str, path: str, **content: Any) -> str:
        try:
            # not aiohttp's own timeout: it can swallow the cancellation by another one that ends at the same moment
            async with asyncio.timeout(self._server.deadline_s):
                # a redirect would send the question, and perhaps the key, to an address that the user does not know
                async with self._session.request(
                    method, f"{self._url}/{path}", allow_redirects=False, **content
                ) as response:
                    if response.status == 200:
                        return await _text_of(response)
                    raise self._error(response, await self._error_text_of(response))
        except TimeoutError as error:
            raise ServerAwayError(f"no reply within {self._server.deadline_s:g} s", may_be_request=True) from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise ServerRefusesError(self.shown(str(error)), self._change_for(None)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerAwayError(self.shown(f"{type(error).__name__}: {error}")) from error

    async def _error_text_of(self, response: aiohttp.ClientResponse) -> str:
        """Return the beginning of the body of an error, as far as it comes in time."""
        body = bytearray()
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(min(ERROR_BODY_S, self._server.deadline_s / 2)):
                async for part in response.content.iter_any():
                    body += part[: MAX_ERROR_BYTES - len(body)]
                    if len(body) >= MAX_ERROR_BYTES:
                        break
        return body.decode("utf-8", errors="replace")

    def _error(self, response: aiohttp.ClientResponse, text: str) -> Exception:
        """Return the error for a reply with another status than 200."""
        status = response.status
        why = self.shown(f"status {status}: {text}".rstrip(": "))
        if status >= 500 or status in LATER:
            wait_s = retry_after_s(response.headers.get("Retry-After", ""), now=datetime.now(UTC))
            return ServerAwayError(why, retry_after_s=wait_s, may_be_request=status == 500)
        if status in OF_REQUEST:
            return UnusableReplyError(why, is_final=True)
        if 300 <= status < 400:
            why = self.shown(f"status {status}, which leads to {response.headers.get('Location', 'no address')}")
        return ServerRefusesError(why, self._change_for(status), status=status)

    def _change_for(self, status: int | None) -> str:
        """Return what the user can do about a status with which a server refuses every request, or, without a status,
        about its certificate."""
        key, variable = f"reward.judges.{self._judge}", self._server.api_key_env
        if status is None:
            return f"correct {key}.url, or name the file with the issuer's certificate in SSL_CERT_FILE"
        if status in (401, 402, 403) and variable is None:
            return f"it wants a key: put it into an environment variable and name that in {key}.api_key_env"
        if status in (401, 402, 403):
            return f"give the environment variable {variable} ({key}.api_key_env) a key that may use {key}.model"
        if status == 404:
            return (
                f"correct {key}.model, or {key}.url, which goes up to and including the version, such as "
                "http://host:8000/v1"
            )
        return f"correct {key}.url: it must be that of a server for OpenAI's chat completions"


def retry_after_s(header: str, *, now: datetime) -> float:
    """Return the seconds that a header `Retry-After` asks to wait, which it gives as a number or a date; 0 if it cannot
    be read or is in the past, and a day at most."""
    header = header.strip()
    try:
        if header.isdecimal():
            return min(float(header), MAX_RETRY_AFTER_S)
        date = parsedate_to_datetime(header)
        wait_s = (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(wait_s, 0.0), MAX_RETRY_AFTER_S)


async def _text_of(response: aiohttp.ClientResponse) -> str:
    """Return the whole body. Raises UnusableReplyError, before more than the limit was read."""
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise UnusableReplyError(f"its reply is compressed ({encoding[:MAX_SHOWN]}), although none was asked for")
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_REPLY_BYTES:
            raise UnusableReplyError(f"its reply is longer than {MAX_REPLY_BYTES} bytes, and no more are read")
    return body.decode("utf-8", errors="replace")


def _forms_of(api_key: str | None) -> tuple[str, ...]:
    """Return the forms in which a key may stand in a text or in JSON."""
    if api_key is None or len(api_key) < MIN_KEY_CHARS:
        return ()
    return (api_key, json.dumps(api_key)[1:-1])


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
