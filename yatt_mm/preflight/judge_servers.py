"""Asks the servers of judges one small question before a run starts, so that a wrong address, key or model is found."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from yatt_mm.common.errors import ConfigError
from yatt_mm.config.judge_section import api_key_of, judge_spec, remote_spec
from yatt_mm.config.run_config import Config
from yatt_mm.protocol.genrm import JudgeSpec, RemoteSpec
from yatt_mm.protocol.verdicts import YesNo

if TYPE_CHECKING:
    from yatt_mm.genrm.chat_client import ChatClient

BUDGET_S = 20.0
"""The time in seconds in which each server must give a reply at the start, with all questions together."""
MODELS_S = 3.0
"""The seconds for the list of a server's models, which an error shows."""
QUESTION = [{"type": "text", "text": "Is water wet? Say yes or no."}]


def check_judge_servers(config: Config, *, budget_s: float = BUDGET_S) -> None:
    """Ask every server of a judge one small question, all at the same time. The reply must be a chat completion.

    Raises:
        ConfigError: a server does not reply in time, refuses the key or the model, or is no such server.
    """
    names = [name for name, section in config.reward.judges.items() if section.url is not None]
    if names:
        asyncio.run(_check_all(config, names, budget_s))


def open_keys(config: Config) -> Iterator[str]:
    """Yield a warning for each server that gets its key without encryption, over more than this machine."""
    for name, section in config.reward.judges.items():
        address = urlsplit(section.url or "")
        if section.api_key_env is None or address.scheme != "http" or _is_loopback(address.hostname or ""):
            continue
        yield (
            f"reward.judges.{name}.url {section.url} is not encrypted, so what lies between here and "
            f"{address.hostname} can read the key of {section.api_key_env}, and the responses: use an https:// "
            "address, or a tunnel (ssh -L) and http://localhost"
        )


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


async def _check_all(config: Config, names: list[str], budget_s: float) -> None:
    try:
        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(_check(config, name, budget_s))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__


async def _check(config: Config, name: str, budget_s: float) -> None:
    from yatt_mm.genrm.chat_client import ChatClient  # aiohttp takes a while to import

    section = config.reward.judges[name]
    spec = judge_spec(name, section, config.data.video.sampling())
    server = remote_spec(name, section, controllers_deadline_s=config.controllers.deadline_s)
    assert server is not None, "only judges with a url are asked"
    server = replace(server, deadline_s=min(server.deadline_s, budget_s))
    client = ChatClient(name, server, api_key=api_key_of(name, section))
    try:
        found = await _fault(client, spec, server, budget_s)
    finally:
        await client.close()
    if found is not None:
        what, change = found
        raise ConfigError(f"reward.judges.{name}: model {server.model} at {server.url} {what}; {change}")


async def _fault(client: ChatClient, spec: JudgeSpec, server: RemoteSpec, budget_s: float) -> tuple[str, str] | None:
    """Return what is wrong with a server and what to change; None if it can judge."""
    from yatt_mm.genrm.chat_client import ServerAwayError, ServerRefusesError, UnusableReplyError
    from yatt_mm.genrm.chat_form import question_to, read_reply
    from yatt_mm.genrm.server_waits import pause_s

    key, by_s, why = f"reward.judges.{spec.name}", time.monotonic() + budget_s, ""
    question = question_to(server.model, spec, QUESTION, seed=0) | {"max_tokens": 1}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(budget_s):
            for num_failed in itertools.count(1):
                try:
                    reply = read_reply(spec, text := await client.chat(question))
                except ServerRefusesError as error:
                    return f"cannot judge: {error.found}{await _models(client, error.status)}", error.change
                except UnusableReplyError as error:
                    return f"refuses a small question: {error}", f"correct {key}.url and {key}.model"
                except ValueError:
                    address = f"give {key}.url the address of a server for OpenAI's chat completions, with its version"
                    return f"replies with something else than a chat completion: {client.shown(text)}", address
                except ServerAwayError as error:
                    why = f": {error}"
                    await asyncio.sleep(min(pause_s(num_failed), max(0.0, by_s - time.monotonic())))
                    continue
                if isinstance(spec.verdict, YesNo) and not reply.has_logprobs:
                    logprobs = f"read the verdict with {key}.verdict regex or json, or take a server that gives them"
                    return "gives no log-probabilities of its first token, which verdict yes_no reads", logprobs
                return None
    return f"gave no reply in {budget_s:g} s{why}", f"start the server, or correct {key}.url"


async def _models(client: ChatClient, status: int | None) -> str:
    """Return which models the server has, as the end of a sentence, if it may not know the model; else nothing."""
    from yatt_mm.genrm.chat_client import ServerAwayError, ServerRefusesError, UnusableReplyError

    models: list[str] = []
    if status == 404:
        with contextlib.suppress(ServerAwayError, ServerRefusesError, UnusableReplyError, TimeoutError):
            async with asyncio.timeout(MODELS_S):
                models = await client.models()
    return client.shown(f" (it has {', '.join(models)})") if models else ""
