"""One look for all plots of the docs: small SVG files, the same bytes for the same figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PANEL_INCHES = (3.6, 2.9)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
STYLE: dict[str, Any] = {
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.alpha": 0.3,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",  # text stays text: smaller files that can be searched
    "svg.hashsalt": "prefixcache",
}


def panels(num_columns: int, num_rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Make a figure of equal panels, in reading order. Sets matplotlib's style for the whole process."""
    mpl.rcParams.update(STYLE)
    figure = Figure(figsize=(num_columns * PANEL_INCHES[0], num_rows * PANEL_INCHES[1]), layout="constrained")
    return figure, list(figure.subplots(num_rows, num_columns, squeeze=False).flat)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as SVG, with no date in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for axis in figure.axes:
        axis.minorticks_off()  # half of the file, and nobody reads them
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
