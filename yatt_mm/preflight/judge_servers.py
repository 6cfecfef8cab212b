"""Looks whether the servers of judges are there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from yatt_mm.config.run_config import Config

CONNECT_TIMEOUT_S = 2.0


def unreachable_servers(config: Config) -> Iterator[str]:
    """Yield a warning for each judge whose server does not take connections now. It may still come."""
    for name, section in config.reward.judges.items():
        if section.url is None:
            continue
        address = urlsplit(section.url)
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname or "", port), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            yield (
                f"reward.judges.{name}.url {section.url} takes no connection ({error.strerror or error}); until it "
                f"does, every verdict fails and scores {section.score_on_failure:g} (score_on_failure)"
            )
