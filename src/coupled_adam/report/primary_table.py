"""The test loss of every optimizer against the standard one: the primary comparisons of a study.

The test loss is the primary metric. All its comparisons with the standard optimizer, over all sizes of the table, are
one family, and their p-values are corrected by Holm's method. All other comparisons of a report are secondary and not
corrected.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from coupled_adam.base.text import short, shorthand
from coupled_adam.metrics import METRICS, named
from coupled_adam.report.grid import CellRuns, Grid, optimizer_labels
from coupled_adam.report.pair_tables import PAIR_COLUMNS, interval_cell, p_text, summary_cell
from coupled_adam.report.result_notes import loss_splits
from coupled_adam.report.significance import CONFIDENCE, Comparison, compare, holm
from coupled_adam.report.table_model import (
    Column,
    ReportTable,
    TableCell,
    mean_column,
    number_cell,
    number_column,
    text_column,
)

LOSS = METRICS["loss"]
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
    "p, Holm: corrected by Holm's method for all comparisons in this table. It decides the verdict in this table, at "
    "95%. All other p-values of the report are not corrected.",
)


@dataclass(frozen=True)
class _Pair:
    """A comparison and its names."""

    names: tuple[str, str, str, str]
    """D, N, baseline, optimizer."""
    comparison: Comparison


def primary_table(grid: Grid) -> ReportTable | None:
    """One row per optimizer that shares at least two seeds with a standard one of its size; None without any."""
    pairs = list(_pairs(grid))
    if not pairs:
        return None
    metric = named(LOSS, loss_splits(grid.results))
    corrected = holm([_two_sided(pair.comparison) for pair in pairs])
    rows = tuple(_row(pair, p) for pair, p in zip(pairs, corrected, strict=True))
    title = f"{metric.label.capitalize()} against the standard optimizer"
    return ReportTable("primary", title, COLUMNS, rows, NOTES, groups=2)


def _pairs(grid: Grid) -> Iterator[_Pair]:
    for place in grid.places:
        cells = place.cells
        labels = optimizer_labels(cells)
        for first, baseline in enumerate(cells):
            for second, cell in enumerate(cells):
                if baseline.variant.role == "standard" and cell.variant.role != "standard":
                    comparison = compare(_losses(baseline), _losses(cell), LOSS.better)
                    if comparison.paired_two_sided_p is not None:
                        size = cells[0].size
                        yield _Pair((short(size.tokens), size.model, labels[first], labels[second]), comparison)


def _losses(cell: CellRuns) -> dict[int, float | None]:
    return cell.values(LOSS.key)


def _two_sided(comparison: Comparison) -> float:
    assert comparison.paired_two_sided_p is not None
    return comparison.paired_two_sided_p


def _row(pair: _Pair, corrected: float) -> tuple[TableCell, ...]:
    found = pair.comparison
    difference = found.paired_difference
    assert difference is not None
    is_decided = corrected < 1 - CONFIDENCE
    verdict = ("better" if difference < 0 else "worse") if is_decided else "not significant"
    return (
        *(TableCell(name) for name in pair.names),
        summary_cell(LOSS, found.first),
        summary_cell(LOSS, found.second),
        number_cell(difference, _precise),
        interval_cell(found.paired_interval, _precise),
        number_cell(found.paired_two_sided_p, p_text),
        number_cell(corrected, p_text),
        TableCell(verdict, bold=is_decided),
    )


def _precise(value: float) -> str:
    return shorthand(value, None, DECIMALS)
