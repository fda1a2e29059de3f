"""Figures without a window, and without matplotlib until one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches, and its axes. Raises `ImportError` where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'batchopt[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
