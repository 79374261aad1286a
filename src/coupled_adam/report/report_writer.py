"""The report of a study: figures, tables, and one page that holds them all and opens anywhere.

folders -> results -> figures/*.svg *.pdf, tables/*.csv *.md *.tex, report.html
"""

from collections.abc import Sequence
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.extras import require
from coupled_adam.base.files import remove_leftovers, require_writable, write_whole
from coupled_adam.report.result_tables import FOLDER as TABLES
from coupled_adam.report.result_tables import write_tables_to
from coupled_adam.report.study_plans import StudyPlan, all_planned, read_plans, shared_report
from coupled_adam.study.results import Result, merge_results

FILE_NAME = "report.html"
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
        ValueError: when there is no finished run, or the folders contradict each other.
        ImportError: as `require_packages`.
    """
    require_packages()
    return write_report_of(*read_report(folders), out)


def read_report(folders: Sequence[Path]) -> tuple[list[Result], list[StudyPlan]]:
    """The finished runs of study folders, and what their studies planned; raises as `write_report` does."""
    results = merge_results(folders)
    if not results:
        names = ", ".join(str(folder) for folder in folders) or "no folder"
        raise UserError(f"{names}: no finished run to report; run the study first with `coupled-adam study run`")
    return results, read_plans(folders, results)


def write_report_of(results: Sequence[Result], plans: Sequence[StudyPlan], out: Path) -> Path:
    """Write the report of what `read_report` found, to a folder; returns the path of report.html."""
    from coupled_adam.report.figures import draw_figures, write_figures
    from coupled_adam.report.report_page import render_report

    path = out / FILE_NAME
    require_writable(path)
    for folder in (out, out / FIGURES, out / TABLES):
        remove_leftovers(folder)  # of a report that was killed
    plates = draw_figures(results)
    write_figures(plates, out / FIGURES)
    write_tables_to(out, results, all_planned(plans), shared_report(plans))
    write_whole(path, render_report(results, plans, plates, out))
    return path
