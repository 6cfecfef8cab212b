"""Draws the numbers of surveys: a row of histograms for each data set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from yatt_mm.common.errors import ConfigError
from yatt_mm.survey.survey import MEASURES, Survey

NUM_BINS = 40


def check_picture(path: Path) -> None:
    """Check, before anything is looked at, that the picture can be drawn.

    Raises:
        ConfigError: matplotlib is not installed, its folder is missing, or its format is not known.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError("--histograms needs matplotlib: pip install 'yatt-mm[pictures]'") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--histograms is {path}; wanted a file that ends with .png, .pdf or .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--histograms is {path}, and there is no folder {path.absolute().parent}; make it first")


def draw_histograms(surveys: Sequence[Survey], path: Path) -> None:
    """Write a picture with a histogram of each measure of each set. Its format follows from the file's name.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in MEASURES if any(name in survey.measured for survey in surveys)] or [MEASURES[0]]
    figure = Figure(figsize=(3 * len(names), 2.5 * len(surveys) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(surveys), len(names), squeeze=False)
    for row, survey in zip(panels, surveys):
        row[0].set_ylabel(f"{survey.found.key}\n({survey.num_usable} samples)", fontsize=8)
        for panel, name in zip(row, names):
            panel.tick_params(labelsize=7)
            panel.set_title(name, fontsize=8)
            if name in survey.measured:
                panel.hist(survey.measures[name], bins=NUM_BINS, color="#4477aa")
            else:
                panel.set_axis_off()
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise ConfigError(f"cannot write the picture {path}: {error}") from error
