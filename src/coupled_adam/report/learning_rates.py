"""The loss over the learning rate, and how sensitive an optimizer is to it.

Cells of one size whose settings differ only in the learning rate make a *curve*. Its sensitivity is the expected excess
loss: the mean loss over the learning rates tried, minus the smallest loss.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from coupled_adam.base.text import setting, short
from coupled_adam.metrics import METRICS
from coupled_adam.report.grid import CellRuns, Grid, Size, Variant
from coupled_adam.report.pair_tables import summary_cell
from coupled_adam.report.significance import Summary, summarise
from coupled_adam.report.table_model import ReportTable, TableCell, mean_column, number_column, text_column

LEAST_RATES = 3
"""Fewest points of a curve: two could be two different optimizers."""
LOSS = METRICS["loss"]
COLUMNS = (
    text_column("D", "D", "$D$"),
    text_column("N", "N", "$N$"),
    text_column("optimizer", "optimizer"),
    text_column("rates", "learning rates"),
    number_column("best_lr", "best lr"),
    mean_column("best_loss", "loss there (↓)", r"loss there ($\downarrow$)"),
    mean_column("sensitivity", "sensitivity (↓)", r"sensitivity ($\downarrow$)"),
)
NOTES = (
    "Sensitivity: the mean loss over the learning rates minus the loss at the best one. Compare optimizers only over "
    "the same rates, evenly spaced on a logarithmic scale.",
    "Mean over the seeds, with the standard deviation in parentheses; each seed has its own sensitivity.",
)


@dataclass(frozen=True)
class RateCurve:
    """One optimizer of one size over the learning rate."""

    size: Size
    name: str
    """Common name of its cells, without the learning rate."""
    variant: Variant
    """At the smallest learning rate, for its colour and line style."""
    cells: tuple[tuple[float, CellRuns], ...]
    """By learning rate, ascending; including those without a finished run."""

    def losses(self) -> list[tuple[float, Summary]]:
        """The loss over the seeds by learning rate, without missing ones."""
        found = [(lr, summarise(cell.values(LOSS.key).values())) for lr, cell in self.cells]
        return [(lr, summary) for lr, summary in found if summary.mean is not None]

    def missing(self) -> list[float]:
        """Learning rates without a finished run: diverged or not done yet."""
        there = {lr for lr, _ in self.losses()}
        return [lr for lr, _ in self.cells if lr not in there]

    def sensitivities(self) -> list[float]:
        """The sensitivity of each seed that has all learning rates; empty if a learning rate has no run."""
        curves = [cell.values(LOSS.key) for _, cell in self.cells]
        seeds = set.intersection(*(set(curve) for curve in curves))
        values = [[curve[seed] for curve in curves] for seed in sorted(seeds)]
        return [sensitivity([loss for loss in each if loss is not None]) for each in values if None not in each]


def sensitivity(losses: Sequence[float]) -> float:
    """The expected excess loss over learning rates: the mean minus the smallest.

    Example:
        >>> sensitivity([3.5, 3.0, 4.0])
        0.5
    """
    return sum(losses) / len(losses) - min(losses)


def rate_curves(grid: Grid) -> list[RateCurve]:
    """Every optimizer and size with enough learning rates for a curve."""
    groups: dict[tuple[Size, str, str], list[tuple[float, CellRuns]]] = {}
    for cell in grid.cells:
        lr = cell.variant.settings.get("lr")
        if isinstance(lr, int | float):
            others = {key: value for key, value in cell.variant.settings.items() if key != "lr"}
            place = cell.size, re.sub(r" ?\blr=\S+", "", cell.variant.name).strip(), repr(sorted(others.items()))
            groups.setdefault(place, []).append((float(lr), cell))
    curves = []
    for (size, name, _), cells in groups.items():
        ordered = tuple(sorted(cells, key=lambda each: each[0]))
        if len({lr for lr, _ in ordered}) == len(ordered) >= LEAST_RATES:
            curves.append(RateCurve(size, name, ordered[0][1].variant, ordered))
    return curves


def sensitivity_table(grid: Grid) -> ReportTable | None:
    """One row per curve; None if the study does not vary the learning rate."""
    curves = [curve for curve in rate_curves(grid) if curve.losses()]
    if not curves:
        return None
    rows, notes = [], list(NOTES)
    for curve in curves:
        best_lr, best = min(curve.losses(), key=lambda each: each[1].mean or 0.0)
        found = summarise(curve.sensitivities())
        edges = (curve.cells[0][0], curve.cells[-1][0])
        lowest, highest = map(setting, edges)
        rows.append(
            (
                TableCell(short(curve.size.tokens)),
                TableCell(curve.size.model),
                TableCell(curve.name),
                TableCell(f"{len(curve.losses())} from {lowest} to {highest}"),
                TableCell(setting(best_lr), {"value": best_lr}),
                summary_cell(LOSS, best),
                summary_cell(LOSS, found),
            )
        )
        if curve.missing():
            rates = ", ".join(map(setting, curve.missing()))
            notes.append(f"{curve.name}: no finished run at lr = {rates}, so its sensitivity is unknown.")
        if best_lr in edges:
            notes.append(f"{curve.name}: the best learning rate is the {_end(best_lr, edges)} one tried.")
    return ReportTable("learning_rates", "Sensitivity to the learning rate", COLUMNS, tuple(rows), tuple(notes), 2)


def _end(value: float, edges: tuple[float, float]) -> str:
    return "smallest" if value == edges[0] else "largest"
