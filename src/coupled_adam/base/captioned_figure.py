"""Figures with a title and a caption, in one style, embedded in a page and saved as separate files.

Every figure is drawn inside `figure_style()` and rendered once as SVG. In a page it takes the page's colours, light or
dark; as a file it has a white background. Its ids are the same on every machine. A figure is about as wide as a phone
screen, so its text is readable there. Scatter plots are rasterized inside the SVG, because ten thousand circles render
slowly.
"""

import io
import math
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from coupled_adam.base.extras import require
from coupled_adam.base.files import replacing, write_whole
from coupled_adam.base.text import setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # placeholder for the page's text colour; nothing else in a figure may use it
PAPER = "#fefdfc"  # placeholder for the page's background; white in a file
GRID = "#d9dde3"  # replaced by the page's line colour; kept as it is in a file
POINTS, MARK = "#3d87c9", "#e0632b"  # visible on white and on black
FAINT = "#868e99"  # readable on white and on black: values before training, and reference lines
# For series other than optimizers, such as model sizes; distinguishable with any kind of colour vision.
SERIES_COLOURS = ("#7b6bd6", "#1a9e78", "#c98a00", "#d1557f", "#5f7f96")
MARKERS = ("o", "s", "^", "D", "v")
WIDTH = 5.4  # inches
MOST_COLUMNS = 6  # of a legend
DOTS_PER_INCH = 180
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,  # names of studies, runs and models may contain dollar signs
    "axes.titlesize": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class CaptionedFigure:
    """One figure of a page."""

    name: str
    """File name without .svg or .pdf. It prefixes every id in the SVG, so it must be unique within a page."""
    title: str
    caption: str
    figure: "Figure"
    svg: str
    """An SVG element for a page that defines --line and --page."""


def figure_style() -> AbstractContextManager[None]:
    """Context manager in which figures are drawn and rendered."""
    style: AbstractContextManager[None] = _matplotlib().rc_context(STYLE)
    return style


def captioned_figure(name: str, title: str, caption: str, figure: "Figure") -> CaptionedFigure:
    """Render a figure; draw it and call this inside `figure_style()`."""
    svg = _to_svg(figure, name)
    figure.set_layout_engine("none")  # already laid out; repeating it for the PDF would be slow
    return CaptionedFigure(name, title, caption, figure, svg)


def _to_svg(figure: "Figure", name: str) -> str:
    """The figure as an SVG element whose ids begin with `name`."""
    buffer = io.StringIO()
    unnamed = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _matplotlib().rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, dpi=DOTS_PER_INCH, metadata=unnamed)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return svg.replace(INK, "currentColor").replace(GRID, "var(--line)").replace(PAPER, "var(--page)")


def write_captioned_figures(figures: Sequence[CaptionedFigure], folder: Path, all_names: Collection[str]) -> None:
    """Write NAME.svg and NAME.pdf for every figure, and delete files of figures that are no longer drawn.

    Args:
        figures: from `captioned_figure`.
        folder: created if missing.
        all_names: names of all figures that the folder may contain.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in set(all_names) - {each.name for each in figures}:
        for kind in ("svg", "pdf"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    for each in figures:
        write_whole(folder / f"{each.name}.svg", standalone_svg(each.svg))
        with replacing(folder / f"{each.name}.pdf") as temporary, figure_style():
            each.figure.savefig(temporary, format="pdf", dpi=DOTS_PER_INCH, metadata={"CreationDate": None})


def standalone_svg(svg: str) -> str:
    """Turn a page's SVG element into the text of an SVG file, with fixed colours and a white background."""
    plain = svg.replace("currentColor", INK).replace("var(--line)", GRID).replace("var(--page)", "#ffffff")
    end = plain.index(">") + 1
    return f'{plain[:end]}\n<rect width="100%" height="100%" fill="#ffffff"/>{plain[end:]}\n'


def panels(rows: int, columns: int, height: float, *, share_y: bool = False) -> "tuple[Figure, list[list[Axes]]]":
    """A figure of axes in rows and columns, each row `height` inches high."""
    figure: Figure = _matplotlib("figure").Figure(figsize=(WIDTH, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    return figure, [list(row) for row in axes]


def legend_above(figure: "Figure", shown: "Iterable[Axes]") -> None:
    """Add one legend for all panels above the data, and enlarge the figure to fit it."""
    entries: dict[str, Any] = {}
    for axes in shown:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    width, height = figure.get_size_inches()
    style: dict[str, Any] = {"loc": "outside upper center", "handlelength": 1.8, "columnspacing": 1.2}
    columns = min(len(entries), MOST_COLUMNS)
    legend = figure.legend(entries.values(), entries, ncols=columns, **style)
    while columns > 1 and legend.get_window_extent().width > width * figure.dpi:
        columns -= 1
        legend.remove()
        legend = figure.legend(entries.values(), entries, ncols=columns, **style)
    figure.set_figheight(height + 0.2 * -(-len(entries) // columns))


def powers_of_ten(axes: "Axes") -> None:
    """Label logarithmic axes with powers of ten as plain text; set the axis limits first.

    matplotlib's own labels need math text, which `figure_style()` turns off.
    """
    ticker = _matplotlib("ticker")
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() != "log":
            continue
        low, high = sorted(axis.get_view_interval())
        is_short = high < 10 * low  # the axis shows at most one power of ten
        axis.set_major_locator(ticker.LogLocator(numticks=5))
        axis.set_major_formatter(ticker.FuncFormatter(_power_of_ten))
        axis.set_minor_formatter(
            ticker.FuncFormatter(lambda value, _: setting(value)) if is_short else ticker.NullFormatter()
        )


def _power_of_ten(value: float, _place: int | None) -> str:
    return "10" + str(round(math.log10(value))).translate(RAISED)


def _matplotlib(part: str = "") -> ModuleType:
    return require(f"matplotlib.{part}" if part else "matplotlib", "study", "to draw figures")
