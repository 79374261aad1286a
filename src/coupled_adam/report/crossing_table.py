"""From which step on an optimizer is ahead of the standard one: where their curves of the validation loss cross.

Coupled Adam often begins behind and ends in front, so whether it pays depends on how long the training is. Runs with
the same seed see the same batches and are compared with each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coupled_adam.base.text import short, shorthand
from coupled_adam.report.comparison_table import PAIR_COLUMNS, pairs_of
from coupled_adam.report.curves import Curve, curve_of
from coupled_adam.report.grid import CellRuns, Grid, model_labels, optimizer_labels
from coupled_adam.report.significance import Summary, summarise
from coupled_adam.report.table_model import ReportTable, TableCell, mean_cell, mean_column, text_column

COLUMNS = (
    *PAIR_COLUMNS,
    text_column("steps", "steps"),
    text_column("seeds", "seeds that cross"),
    mean_column("step", "ahead from step"),
    mean_column("tokens", "tokens until then"),
    mean_column("share", "share of the run"),
    mean_column("difference", "difference at the end"),
)
NOTES = (
    "Ahead from step: the first validation from which on the validation loss of the optimizer stays below that of the "
    "baseline with the same seed. Mean over the seeds that get there, with the standard deviation in parentheses.",
    "A learning rate that decays brings crossings forward or back: a shorter run is not the beginning of a longer one.",
)


@dataclass(frozen=True)
class Crossing:
    """Two curves of the validation loss, set against each other."""

    step: int | None
    """From this validation on the second is below the first; None: at the end it is not."""
    last_step: int
    difference: float
    """Second less first, at the end."""


def crossing(first: Curve, second: Curve) -> Crossing | None:
    """Where the second curve falls below the first for good; None for curves that do not end at the same step.

    Of such curves one was cut, or the runs have batches of different sizes: then a step is not the same share of both.

    Example:
        >>> crossing({1: 5.0, 2: 4.0, 3: 3.5}, {1: 6.0, 2: 3.9, 3: 3.0})
        Crossing(step=2, last_step=3, difference=-0.5)
    """
    if not first or not second or max(first) != max(second):
        return None
    steps = sorted(first.keys() & second.keys())
    ahead = None
    for step in reversed(steps):
        if second[step] >= first[step]:
            break
        ahead = step
    return Crossing(ahead, steps[-1], second[steps[-1]] - first[steps[-1]])


def crossing_table(grid: Grid) -> ReportTable | None:
    """Each standard optimizer against the others of its D and model; None where no two runs have logged a validation
    loss. What is tied and its untied twin are no such pair: they are two models."""
    models = model_labels(grid.cells)
    rows = []
    uneven = []  # pairs with curves that do not end together
    for place in grid.places:
        own, tokens = place.cells, place.cells[0].size.tokens
        names = optimizer_labels(own)
        for first, second in pairs_of(own):
            are_twins = own[second].variant.role == "standard" and own[first].size != own[second].size
            if own[first].variant.role != "standard" or are_twins:
                continue
            head = (short(tokens), models[own[second].size], names[first], names[second])
            found, seeds = _crossings(own[first], own[second])
            if found:
                rows.append(_row(head, found, tokens))
            if seeds:
                uneven.append(f"{head[2]} and {head[3]} at {head[0]}, {head[1]} (seed {', '.join(map(str, seeds))})")
    if not rows:
        return None
    notes = (f"Left out, as their curves end at different steps: {'; '.join(uneven)}.",) if uneven else ()
    return ReportTable("crossing", "From when on it is ahead", COLUMNS, tuple(rows), (*NOTES, *notes), groups=2)


def _crossings(first: CellRuns, second: CellRuns) -> tuple[list[Crossing], list[int]]:
    """Of the seeds that both have; and the seeds of those whose curves do not end at the same step."""
    found, uneven = [], []
    for seed in sorted(first.runs.keys() & second.runs.keys()):
        curves = [curve_of(cell.runs[seed].run_folder, "val", "loss") for cell in (first, second)]
        each = crossing(*curves)
        if each is not None:
            found.append(each)
        elif all(curves):
            uneven.append(seed)
    return found, uneven


def _row(head: Sequence[str], found: Sequence[Crossing], tokens: int) -> tuple[TableCell, ...]:
    there = [(each.step, each.last_step) for each in found if each.step is not None]
    steps = summarise([float(step) for step, _ in there])
    shares = summarise([step / last for step, last in there])
    seen = summarise([tokens * step / last for step, last in there])
    return (
        *(TableCell(text) for text in head),
        TableCell(f"{max(each.last_step for each in found):,}"),
        TableCell(f"{len(there)} of {len(found)}"),
        _cell(steps, 0),
        mean_cell(seen, lambda mean, _: short(round(mean))),
        _cell(shares, 2),
        _cell(summarise([each.difference for each in found]), 3),
    )


def _cell(summary: Summary, decimals: int) -> TableCell:
    return mean_cell(summary, lambda mean, std: shorthand(mean, std, decimals))
