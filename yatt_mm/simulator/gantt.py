"""Draws a Gantt chart of the layouts: one panel per layout, one bar per cell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from yatt_mm.common.errors import ConfigError
from yatt_mm.simulator.cells import Span, Use
from yatt_mm.simulator.results import LayoutResult

COLOURS = {
    Use.ROLLOUT: "#4477aa",
    Use.GENRM: "#ee6677",
    Use.TRAIN: "#228833",
    Use.PUBLISH: "#ccbb44",
    Use.SWITCH: "#bbbbbb",
    Use.IDLE: "#ffffff",
}
MAX_CELLS = 32
"""The number of cells that are drawn of each layout, evenly chosen."""


def draw(results: Sequence[LayoutResult], path: str) -> None:
    """Write a Gantt chart of the layouts' phases. Its format follows from the file's name.

    Raises:
        ConfigError: matplotlib is not installed, or the format is not known.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ConfigError("--gantt needs matplotlib: pip install 'yatt-mm[pictures]'") from error
    figure = Figure(figsize=(12, 1.6 * len(results) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, result in zip(panels, results):
        rows = _rows(result.spans)
        for row, spans in enumerate(rows):
            panel.broken_barh(
                [(span.start_s, span.end_s - span.start_s) for span in spans],
                (row, 0.9),
                facecolors=[COLOURS[span.use] for span in spans],
            )
        panel.set_title(f"{result.name}: {result.split}", fontsize=8, loc="left")
        panel.set_yticks([])
        panel.set_ylabel(f"{len(rows)} cells", fontsize=7)
    panels[-1].set_xlabel("seconds")
    legend = [Patch(facecolor=colour, edgecolor="black", label=str(use)) for use, colour in COLOURS.items()]
    figure.legend(handles=legend, ncols=len(legend), loc="outside lower center", fontsize=8)
    try:
        figure.savefig(Path(path), dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    cells = sorted({span.cell for span in spans})
    every = max(1, len(cells) // MAX_CELLS)
    chosen = cells[::every][:MAX_CELLS]
    return [[span for span in spans if span.cell == cell] for cell in chosen]
