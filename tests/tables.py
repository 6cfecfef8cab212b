"""Tables of seconds that tests fill, and that pytest shows at its end, also if the tests ran in workers of xdist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

TABLES = pytest.StashKey[list[str]]()
"""The tables of this process, in Markdown."""


def show_seconds(
    config: pytest.Config,
    title: str,
    columns: Sequence[str],
    seconds: Mapping[str, Mapping[str, float]],
    *,
    num_digits: int,
) -> None:
    """Show a table in Markdown at the end. `columns`: the names, that of the rows first. `seconds`: [row][column] what
    was measured; other cells are empty. `num_digits`: behind the point."""
    lines = [f"{title}:", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, found in seconds.items():
        cells = [f"{found[column]:.{num_digits}f}" if column in found else "" for column in columns[1:]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    config.stash.setdefault(TABLES, []).append("\n".join(lines))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker, hand the tables to the process that started it."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tables"] = session.config.stash.get(TABLES, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the tables of a worker that has ended."""
    node.config.stash.setdefault(TABLES, []).extend(getattr(node, "workeroutput", {}).get("tables", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show all tables."""
    for table in terminalreporter.config.stash.get(TABLES, []):
        terminalreporter.write_line(f"\n{table}")
