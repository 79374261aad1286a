"""Contents of a report: its grid, tables and verdict, computed once for the terminal, the files and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.text import counted
from coupled_adam.config.study_sections import ReportSection
from coupled_adam.report.grid import Grid, gather_grid
from coupled_adam.report.primary_comparisons import PrimaryComparison, primary_comparisons
from coupled_adam.report.result_tables import build_tables
from coupled_adam.report.study_plans import StudyPlan, all_planned, read_plans, shared_report
from coupled_adam.report.table_model import ReportTable
from coupled_adam.report.verdict import verdict
from coupled_adam.report.verdict_sentences import Verdict
from coupled_adam.study.results import Result, merge_results


@dataclass(frozen=True)
class Contents:
    """The contents of one report."""

    plans: Sequence[StudyPlan]
    """One per study folder."""
    section: ReportSection
    """Which metrics come first, and a note on the loss."""
    grid: Grid
    """The finished runs, at least one, and the expected cells."""
    primary: Sequence[PrimaryComparison]
    """The comparisons behind the table `primary`, its figure and the verdict on the loss."""
    tables: Sequence[ReportTable]
    verdict: Verdict


def read_report(folders: Sequence[Path]) -> Contents:
    """Compute the report of one study folder, or of several merged.

    Args:
        folders: written by `coupled-adam study run`, with at least one finished run.

    Raises:
        UserError: no run is finished, or the folders contradict each other.
        ImportError: scipy is missing.
    """
    results = merge_results(folders)
    if all(result.is_candidate for result in results):
        names = ", ".join(str(folder) for folder in folders) or "no folder"
        but = f", only {counted(len(results), 'candidate')} of selections" if results else ""
        raise UserError(f"{names}: no finished run to report{but}; run the study first with `coupled-adam study run`")
    return contents_of(results, read_plans(folders, results))


def contents_of(results: Sequence[Result], plans: Sequence[StudyPlan]) -> Contents:
    """Compute the report of finished runs and the plans of their studies."""
    reported = [result for result in results if not result.is_candidate]
    candidates = [result for result in results if result.is_candidate]
    grid, section = gather_grid(reported, all_planned(plans)), shared_report(plans)
    primary = primary_comparisons(grid)
    tables = build_tables(grid, section, candidates, primary)
    return Contents(plans, section, grid, primary, tables, verdict(grid, section, primary))
