"""The keys of judges' servers: from the environment of the launcher into files that only its user can read.

The variables are gone from the environment while the run's processes start, so that none of them inherits a key. They
would pass it on to their children, and everything that reads an environment would show it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from yatt_mm.common.tokens import write_secret
from yatt_mm.config.judge_section import JudgeSection, api_key_of


def key_file(folder: Path, name: str, section: JudgeSection) -> Path | None:
    """Return the file in `folder` for the key of a judge's server; None if the server needs none."""
    return None if section.api_key_env is None else folder / f"judge_key_{name}"


@contextmanager
def keys_in_files(judges: Mapping[str, JudgeSection], folder: Path) -> Iterator[None]:
    """Write the key of each judge into its file in `folder`, and keep the variables of all keys out of the environment
    of this process during the block.

    Raises:
        ConfigError: a variable is not set, or no header can hold its value.
    """
    for name, section in judges.items():
        file, key = key_file(folder, name, section), api_key_of(name, section)
        if file is not None and key is not None:
            write_secret(file, key)
    variables = {section.api_key_env for section in judges.values() if section.api_key_env is not None}
    taken = {variable: os.environ.pop(variable) for variable in variables}
    try:
        yield
    finally:
        os.environ.update(taken)
