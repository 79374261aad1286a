"""Loss and calibration by token frequency: every optimizer of a size against the first one, bin by bin.

The training text alone determines the bins, so all runs on one corpus have the same bins.
"""

from collections.abc import Iterator, Sequence

from coupled_adam.base.notation import MISSING
from coupled_adam.base.text import short, shorthand
from coupled_adam.metrics import BIN_CALIBRATION, BIN_LOSS, BIN_TARGETS, BIN_TOKENS, FREQUENCY_BINS, Metric, bin_key
from coupled_adam.report.grid import CellRuns, Grid, optimizer_labels
from coupled_adam.report.pair_tables import claim_text, summary_cell
from coupled_adam.report.result_notes import loss_note
from coupled_adam.report.significance import Comparison, compare, is_number, summarise
from coupled_adam.report.table_model import Column, ReportTable, TableCell, mean_column, text_column

NUMBERS = range(1, FREQUENCY_BINS + 1)
COLUMNS = (
    text_column("D", "D", "$D$"),
    text_column("N", "N", "$N$"),
    text_column("bin", "bin"),
    *(Column(each.key, each.heading, each.latex_heading, numbers=("value",)) for each in (BIN_TOKENS, BIN_TARGETS)),
    text_column("optimizer", "optimizer"),
    mean_column(BIN_LOSS.key, BIN_LOSS.heading, BIN_LOSS.latex_heading),
    Column("difference", "difference", "difference", ("value", "std", "threshold")),
    text_column("verdict", "verdict"),
    mean_column(BIN_CALIBRATION.key, BIN_CALIBRATION.heading, BIN_CALIBRATION.latex_heading),
)
NOTES = (
    "Bin 1 has the most frequent tokens, which make up half of the training text; each further bin covers half of the "
    "rest, and bin 10 everything left, including tokens that never occur in training.",
    "Mean over the seeds, with the standard deviation in parentheses: 0.123(4) is 0.123 ± 0.004.",
    "Difference: the loss of the optimizer minus the loss of the first optimizer at the same D and N. Verdict: the "
    "paper's one-sided Student's t-test at 95%, separately for each bin: without any real difference, chance alone "
    "makes one bin in twenty better and one in twenty worse.",
    "Calibration: log of the predicted over the observed share of the bin's tokens. 0 is calibrated; below 0 the model "
    "underestimates these tokens, above 0 it overestimates them.",
)


def binned_cells(place: Grid) -> list[CellRuns]:
    """The cells of one D and model that have a loss by token frequency; the first is the baseline."""
    return [cell for cell in place.cells if any(summarise(bin_values(cell, BIN_LOSS, each)).count for each in NUMBERS)]


def bin_values(cell: CellRuns, metric: Metric, number: int) -> list[float | None]:
    """One metric of one bin, for every seed."""
    return list(cell.values(bin_key(metric, number)).values())


def compare_bin(first: CellRuns, second: CellRuns, number: int) -> Comparison:
    """Compare the loss of one bin in the second cell with the first."""
    key = bin_key(BIN_LOSS, number)
    return compare(first.values(key), second.values(key), BIN_LOSS.better)


def frequency_table(grid: Grid) -> ReportTable | None:
    """One row per optimizer and bin with targets; None if no run has a loss by token frequency."""
    rows = [
        (TableCell(short(place.cells[0].size.tokens)), TableCell(place.cells[0].size.model), *row)
        for place in grid.places
        for row in _rows(binned_cells(place))
    ]
    if not rows:
        return None
    note = loss_note(grid.results)
    notes = (*NOTES, note) if note else NOTES
    return ReportTable("loss_by_frequency", "Loss by token frequency", COLUMNS, tuple(rows), notes, groups=2)


def _rows(cells: Sequence[CellRuns]) -> Iterator[tuple[TableCell, ...]]:
    """The rows of one D and model, without the columns D and N."""
    names = optimizer_labels(cells)
    for number in NUMBERS:
        for cell, name in zip(cells, names, strict=True):
            loss = summarise(bin_values(cell, BIN_LOSS, number))
            if loss.count:
                yield (
                    TableCell(str(number)),
                    _count(cell, BIN_TOKENS, number),
                    _count(cell, BIN_TARGETS, number),
                    TableCell(name),
                    summary_cell(BIN_LOSS, loss),
                    *_against(cells[0], cell, number),
                    summary_cell(BIN_CALIBRATION, summarise(bin_values(cell, BIN_CALIBRATION, number))),
                )


def _count(cell: CellRuns, metric: Metric, number: int) -> TableCell:
    """A count of a bin, which is the same in all runs unless their texts differ."""
    found = {int(value) for value in bin_values(cell, metric, number) if is_number(value)}
    text = " or ".join(f"{value:,}" for value in sorted(found))
    return TableCell(text or MISSING, {"value": found.pop() if len(found) == 1 else None})


def _against(first: CellRuns, cell: CellRuns, number: int) -> tuple[TableCell, TableCell]:
    """The difference to the first cell and the verdict of the test; dashes for the first cell itself."""
    if cell is first:
        return TableCell(MISSING), TableCell(MISSING)
    comparison = compare_bin(first, cell, number)
    if comparison.difference is None:
        return TableCell(MISSING), TableCell(claim_text(comparison))
    is_decided = bool(comparison.significant or comparison.significantly_worse)
    numbers = {"value": comparison.difference, "std": comparison.difference_std, "threshold": comparison.threshold}
    text = shorthand(comparison.difference, comparison.difference_std, BIN_LOSS.decimals)
    return TableCell(text, numbers), TableCell(claim_text(comparison), bold=is_decided)
