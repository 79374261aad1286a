"""The figures of a study: pure functions from results to a matplotlib figure, or None without data.

Needs matplotlib, so it is imported only when a report is written.
"""

from coupled_adam.base.captioned_figure import CaptionedFigure
from coupled_adam.report.figures.figure_list import draw_figures, write_figures

__all__ = ["CaptionedFigure", "draw_figures", "write_figures"]
