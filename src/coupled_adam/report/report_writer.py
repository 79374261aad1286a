"""Write the report of a study: figures, tables, and one self-contained page.

folders -> results -> figures/*.svg *.pdf, tables/*.csv *.md *.tex, report.html

The parts load torch and matplotlib, so they are imported only when a report is written. A study checks for the packages
before it starts.
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
    """Raise if matplotlib, jinja2 or scipy is missing, with the command that installs them."""
    for package in ("matplotlib", "jinja2", "scipy"):
        require(package, "study", "to write a report")


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """Write the report of one study folder, or of several merged.

    Args:
        folders: written by `coupled-adam study run`, with at least one finished run.
        out: folder to write to, created if missing; usually the study folder itself.

    Returns:
        The path of report.html, which is written last.

    Raises:
        UserError: no run is finished, or the folders contradict each other.
        ImportError: a package is missing; see `require_packages`.
    """
    from coupled_adam.report.contents import read_report

    require_packages()
    return write_contents(read_report(folders), out)


def write_contents(contents: "Contents", out: Path) -> Path:
    """Write the contents from `read_report` to a folder; return the path of report.html."""
    from coupled_adam.report.figures import draw_figures, write_figures
    from coupled_adam.report.report_page import render_report
    from coupled_adam.report.result_tables import FOLDER as TABLES
    from coupled_adam.report.result_tables import write_tables

    path = out / REPORT_FILE
    require_writable(path)
    for folder in (out, out / FIGURES, out / TABLES):
        remove_leftovers(folder)  # from a killed process
    figures = draw_figures(contents.grid, contents.primary)
    write_figures(figures, out / FIGURES)
    write_tables(contents.tables, out / TABLES)
    write_whole(path, render_report(contents, figures, out))
    return path
