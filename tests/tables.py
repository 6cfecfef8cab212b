"""Tables that tests show when they are done, whether or not pytest captures what they print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest


def show_table(config: pytest.Config, title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """Show a table in Markdown. `columns`: the names, that of the rows first. `rows`: the other cells of each, by its
    name."""
    capture = config.pluginmanager.getplugin("capturemanager")
    writer = config.get_terminal_writer()
    with capture.global_and_fixture_disabled():
        writer.line(f"\n{title}:")
        writer.line(f"| {' | '.join(columns)} |")
        writer.line("|---" * len(columns) + "|")
        for name, cells in rows.items():
            writer.line(f"| {name} | {' | '.join(cells)} |")
        writer.flush()
