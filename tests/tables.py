"""Tables of seconds that tests show when they are done, whether or not pytest captures what they print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest


def show_seconds(
    config: pytest.Config,
    title: str,
    columns: Sequence[str],
    seconds: Mapping[str, Mapping[str, float]],
    *,
    num_digits: int,
) -> None:
    """Show a table in Markdown. `columns`: the names, that of the rows first. `seconds`: [row][column] what was
    measured; other cells are empty. `num_digits`: behind the point."""
    capture = config.pluginmanager.getplugin("capturemanager")
    writer = config.get_terminal_writer()
    with capture.global_and_fixture_disabled():
        writer.line(f"\n{title}:")
        writer.line(f"| {' | '.join(columns)} |")
        writer.line("|---" * len(columns) + "|")
        for name, found in seconds.items():
            cells = [f"{found[column]:.{num_digits}f}" if column in found else "" for column in columns[1:]]
            writer.line(f"| {name} | {' | '.join(cells)} |")
        writer.flush()
