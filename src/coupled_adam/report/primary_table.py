"""The table of the primary comparisons: the test loss of every optimizer against the standard one."""

from collections.abc import Sequence

from coupled_adam.base.text import short, shorthand
from coupled_adam.report.grid import Grid, optimizer_labels
from coupled_adam.report.pair_tables import PAIR_COLUMNS, interval_cell, p_text, pair_groups, summary_cell
from coupled_adam.report.primary_comparisons import LOSS, PrimaryComparison
from coupled_adam.report.result_notes import loss_splits
from coupled_adam.report.shown_metrics import named
from coupled_adam.report.table_model import (
    Column,
    ReportTable,
    TableCell,
    mean_column,
    number_cell,
    number_column,
    text_column,
)

DECIMALS = 3
COLUMNS = (
    *PAIR_COLUMNS,
    mean_column("x0", "mean of baseline"),
    mean_column("x1", "mean of optimizer"),
    number_column("difference", "difference"),
    Column("interval", "95% interval", r"95\% interval", ("low", "high")),
    number_column("p", "p"),
    number_column("p_holm", "p, Holm"),
    text_column("verdict", "verdict"),
)
NOTES = (
    "Difference: the mean of optimizer minus baseline over runs with the same seed. Interval and p: two-sided "
    "Student's t-test of these differences.",
    "p, Holm: corrected by Holm's method for all comparisons in this table. It decides the verdict at 95%, here "
    "and in the first sentences of the report. All other p-values of the report are not corrected.",
)


def primary_table(grid: Grid, primary: Sequence[PrimaryComparison]) -> ReportTable | None:
    """One row per optimizer that shares at least two seeds with a standard one of its size; None without any."""
    found = [each for each in primary if each.corrected_p is not None]
    if not found:
        return None
    names = {
        cell.name: label
        for place in grid.places
        for cell, label in zip(place.cells, optimizer_labels(place.cells), strict=True)
    }
    metric = named(LOSS, loss_splits(grid.results))
    title = f"{metric.label.capitalize()} against the standard optimizer"
    rows = tuple(_row(each, names[each.baseline.name], names[each.optimizer.name]) for each in found)
    return ReportTable("primary", title, COLUMNS, rows, NOTES, groups=pair_groups(rows))


def _row(primary: PrimaryComparison, baseline: str, optimizer: str) -> tuple[TableCell, ...]:
    found, size = primary.comparison, primary.baseline.size
    is_open = primary.outcome == "open"
    return (
        *(TableCell(name) for name in (short(size.tokens), size.model, baseline, optimizer)),
        summary_cell(LOSS, found.first),
        summary_cell(LOSS, found.second),
        number_cell(found.paired_difference, _precise),
        interval_cell(found.paired_interval, _precise),
        number_cell(found.paired_two_sided_p, p_text),
        number_cell(primary.corrected_p, p_text),
        TableCell("not significant" if is_open else primary.outcome, bold=not is_open),
    )


def _precise(value: float) -> str:
    return shorthand(value, None, DECIMALS)
