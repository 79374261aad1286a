"""Every optimizer against the one it is to be compared with, metric by metric, with the p-values of three tests."""

import itertools
from collections.abc import Sequence

from coupled_adam.base.text import short, shorthand
from coupled_adam.report.grid import CellRuns, Grid, optimizer_labels
from coupled_adam.report.result_notes import loss_splits
from coupled_adam.report.significance import Comparison, Summary, compare
from coupled_adam.report.table_model import (
    Column,
    ReportTable,
    TableCell,
    mean_cell,
    mean_column,
    number_cell,
    number_column,
    text_column,
)
from coupled_adam.study.metrics import METRICS, Lead, Metric, in_order, measured, named

PAIR_COLUMNS = (
    text_column("D", "D", "$D$"),
    text_column("N", "N", "$N$"),
    text_column("baseline", "baseline"),
    text_column("optimizer", "optimizer"),
)
COLUMNS = (
    *PAIR_COLUMNS,
    text_column("metric", "metric"),
    mean_column("x0", "of the baseline"),
    mean_column("x1", "of the optimizer"),
    Column("difference", "difference", "difference", ("value", "std", "t")),
    number_column("threshold", "significant from"),
    number_column("p_paper", "p, paper"),
    number_column("p_welch", "p, Welch"),
    number_column("p_paired", "p, paired"),
    text_column("verdict", "verdict"),
    text_column("notes", "notes"),
)
NOTES = (
    "Difference: the mean of the optimizer less the mean of the baseline.",
    "All tests are one-sided at 95%: p is small where the optimizer is better than the baseline.",
    "Paper: the paper's Student's t-test, which the verdict follows. Welch: Welch's t-test. Paired: t-test of the "
    "differences of runs with the same seed.",
)


def comparison_table(grid: Grid, lead: Lead = "loss") -> ReportTable:
    """The pairs of each D and N: standard against all others, and Coupled Adam against its scaled forms and SGD."""
    splits = loss_splits(grid.results)
    metrics = [
        named(metric, splits)
        for metric in measured(in_order(METRICS.values(), lead), (run.metrics for run in grid.results))
        if metric.better
    ]
    rows = []
    for place in grid.places:
        own = place.cells
        names = optimizer_labels(own)
        for first, second in pairs_of(own):
            head = (short(own[0].size.tokens), own[0].size.model, names[first], names[second])
            for metric in metrics:
                values = own[first].values(metric.key), own[second].values(metric.key)
                # What neither has, such as an input table of its own, is nothing to compare.
                if any(value is not None for side in values for value in side.values()):
                    rows.append(_row(head, metric, compare(*values, metric.better)))
    return ReportTable("comparisons", "Comparisons", COLUMNS, tuple(rows), NOTES, groups=4)


def pairs_of(cells: Sequence[CellRuns]) -> list[tuple[int, int]]:
    """Which cells of one size are compared, by their places: (baseline, optimizer)."""
    standard = [place for place, cell in enumerate(cells) if cell.variant.role == "standard"]
    coupled = [place for place, cell in enumerate(cells) if cell.variant.role == "coupled"]
    rest = [place for place, cell in enumerate(cells) if cell.variant.role not in ("standard", "coupled")]
    if not standard and not coupled:
        return [(rest[0], place) for place in rest[1:]]
    return [
        *((first, second) for first in standard for second in (*coupled, *rest)),
        *((first, second) for first in coupled for second in rest),
        # Several of one kind differ in something else: tied or not, which table is coupled.
        *itertools.combinations(standard, 2),
        *itertools.combinations(coupled, 2),
    ]


def _row(head: Sequence[str], metric: Metric, comparison: Comparison) -> tuple[TableCell, ...]:
    def precise(value: float) -> str:
        return shorthand(value, None, metric.decimals + 2)

    difference = number_cell(comparison.difference, precise)
    return (
        *(TableCell(text) for text in (*head, metric.heading)),
        summary_cell(metric, comparison.first),
        summary_cell(metric, comparison.second),
        TableCell(
            difference.text, {"value": comparison.difference, "std": comparison.difference_std, "t": comparison.t}
        ),
        number_cell(comparison.threshold, precise),
        *(number_cell(p, p_text) for p in (comparison.p_value, comparison.welch_p, comparison.paired_p)),
        TableCell(claim_text(comparison), bold=bool(comparison.significant or comparison.significantly_worse)),
        TableCell("; ".join(comparison.notes)),
    )


def summary_cell(metric: Metric, summary: Summary) -> TableCell:
    """Mean and standard deviation over the seeds of a cell."""
    return mean_cell(summary, lambda mean, std: shorthand(mean, std, metric.decimals_of(summary.count)))


def p_text(p: float) -> str:
    """A p-value in three decimals.

    Example:
        >>> p_text(0.0312), p_text(0.0000001)
        ('0.031', '<0.001')
    """
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def claim_text(comparison: Comparison) -> str:
    """What the paper's test says of the optimizer against the baseline."""
    return "not significant" if comparison.outcome == "open" else comparison.outcome
