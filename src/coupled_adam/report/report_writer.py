"""The report of a study: figures, tables, and one page that holds them all and opens anywhere.

folders -> results -> figures/*.svg *.pdf, tables/*.csv *.md *.tex, report.html

The parts load torch and matplotlib, so they are imported when a report is written: a study asks for the packages of its
report before it starts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coupled_adam.base.extras import require
from coupled_adam.base.files import remove_leftovers, require_writable, write_whole

if TYPE_CHECKING:
    from coupled_adam.report.contents import Contents

REPORT_FILE = "report.html"
FIGURES = "figures"


def require_packages() -> None:
    """Refuse when matplotlib, jinja2 or scipy is missing, with the command that installs them."""
    for package in ("matplotlib", "jinja2", "scipy"):
        require(package, "study", "to write a report")


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of one study folder, or of several as one.

    Args:
        folders: as `coupled-adam study run` leaves them, finished or not; at least one run is.
        out: folder to write to; for one study its own folder. Made if it is missing.

    Returns:
        The path of report.html, which is written last.

    Raises:
        UserError: when there is no finished run, or the folders contradict each other.
        ImportError: as `require_packages`.
    """
    from coupled_adam.report.contents import read_report

    require_packages()
    return write_contents(read_report(folders), out)


def write_contents(contents: "Contents", out: Path) -> Path:
    """Write the report of what `read_report` found, to a folder; returns the path of report.html."""
    from coupled_adam.report.figures import draw_figures, write_figures
    from coupled_adam.report.report_page import render_report
    from coupled_adam.report.result_tables import FOLDER as TABLES
    from coupled_adam.report.result_tables import write_tables

    path = out / REPORT_FILE
    require_writable(path)
    for folder in (out, out / FIGURES, out / TABLES):
        remove_leftovers(folder)  # of a report that was killed
    figures = draw_figures(contents.grid)
    write_figures(figures, out / FIGURES)
    write_tables(contents.tables, out / TABLES)
    write_whole(path, render_report(contents, figures, out))
    return path
