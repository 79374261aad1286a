"""Figures with a title and a caption, that are part of a page and files of their own.

Every figure is rendered once as SVG. The page takes it with the colours of the page around it, the file with a white
ground; both have the same ids on every machine. A figure is about as wide as a phone, so that its letters can be read
there.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coupled_adam.base.files import replacing, write_whole
from coupled_adam.inspection.table_figures import INK, to_svg
from coupled_adam.inspection.table_figures import STYLE as INSPECTION_STYLE

# Unlike the stand-in of the inspection page, this one is also seen: in the files beside the page.
GRID = "#d9dde3"
FAINT = "#868e99"  # readable on white and on black: what was before training, and reference lines
WIDTH = 5.4  # inches
LETTER = 0.075  # inches: a letter of a legend, on average
# Of series that are no optimizers, such as model sizes: told apart with any kind of colour vision.
SERIES_COLOURS = ("#7b6bd6", "#1a9e78", "#c98a00", "#d1557f", "#5f7f96")
MARKERS = ("o", "s", "^", "D", "v")

STYLE: dict[Any, Any] = {
    **INSPECTION_STYLE,
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": GRID,
    "grid.color": GRID,
    "text.parse_math": False,  # names of studies, runs and models are text, whatever dollar signs they have
}


@dataclass(frozen=True)
class Plate:
    """One figure of a page."""

    name: str
    """Of its files, without .svg or .pdf."""
    title: str
    caption: str
    figure: Figure
    svg: str
    """An SVG element for a page that defines --line."""


def plate(name: str, title: str, caption: str, figure: Figure) -> Plate:
    """Render a figure that was drawn in STYLE, in STYLE."""
    svg = to_svg(figure, name).replace(GRID, "var(--line)")
    figure.set_layout_engine("none")  # it is laid out now; again for the PDF would be slow
    return Plate(name, title, caption, figure, svg)


def write_plates(plates: Sequence[Plate], folder: Path, all_names: Collection[str]) -> None:
    """Write NAME.svg and NAME.pdf of every figure; those of an earlier time that are no longer drawn go away.

    Args:
        plates: from `plate`.
        folder: made if it is missing.
        all_names: of the figures that may be in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in set(all_names) - {each.name for each in plates}:
        for kind in ("svg", "pdf"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    for each in plates:
        write_whole(folder / f"{each.name}.svg", standalone_svg(each.svg))
        with replacing(folder / f"{each.name}.pdf") as temporary, matplotlib.rc_context(STYLE):
            each.figure.savefig(temporary, format="pdf", dpi=180, metadata={"CreationDate": None})


def standalone_svg(svg: str) -> str:
    """An SVG element of the page as a file of its own, with colours of its own and a white ground."""
    plain = svg.replace("currentColor", INK).replace("var(--line)", GRID)
    end = plain.index(">") + 1
    return f'{plain[:end]}\n<rect width="100%" height="100%" fill="#ffffff"/>{plain[end:]}\n'


def panels(rows: int, columns: int, height: float, *, share_y: bool = False) -> tuple[Figure, list[list[Axes]]]:
    """A figure of axes in rows and columns, each row `height` inches high."""
    figure = Figure(figsize=(WIDTH, rows * height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=share_y)
    return figure, [list(row) for row in axes]


def legend_above(figure: Figure, shown: Iterable[Axes]) -> None:
    """One legend for all panels, above the data; the figure grows by what it needs."""
    entries: dict[str, Any] = {}
    for axes in shown:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    handles, labels = list(entries.values()), list(entries)
    width, height = figure.get_size_inches()
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(labels), int(width / (LETTER * longest + 0.55))))
    figure.set_figheight(height + 0.2 * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, handlelength=1.8, columnspacing=1.2)
