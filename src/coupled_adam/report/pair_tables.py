"""One optimizer against another: every metric with the p-values of three tests, and the step where it overtakes.

Coupled Adam often starts behind and ends ahead, so whether it pays off depends on the length of the training: where the
curves of the validation loss cross. Runs with the same seed see the same batches and are compared with each other.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coupled_adam.base.notation import MISSING
from coupled_adam.base.text import fixed, short, shorthand
from coupled_adam.metrics import METRICS, Lead, Metric
from coupled_adam.report.baselines import baseline_pairs, baseline_places
from coupled_adam.report.grid import CellRuns, Grid, model_labels, optimizer_labels
from coupled_adam.report.result_notes import loss_splits
from coupled_adam.report.run_files import Curve, curve_of
from coupled_adam.report.shown_metrics import in_order, measured, named
from coupled_adam.report.significance import Comparison, Summary, compare, summarise
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

PAIR_COLUMNS = (
    text_column("D", "D", "$D$"),
    text_column("N", "N", "$N$"),
    text_column("baseline", "baseline"),
    text_column("optimizer", "optimizer"),
)
MOST_BASELINES = 2  # in one group of rows
COMPARISON_COLUMNS = (
    *PAIR_COLUMNS,
    text_column("metric", "metric"),
    mean_column("x0", "mean of baseline"),
    mean_column("x1", "mean of optimizer"),
    Column("difference", "difference", "difference", ("value", "std", "t")),
    Column("interval", "95% interval", r"95\% interval", ("low", "high")),
    number_column("threshold", "significant from"),
    number_column("p_paper", "p, paper"),
    number_column("p_welch", "p, Welch"),
    number_column("p_paired", "p, paired"),
    text_column("verdict", "verdict"),
    text_column("notes", "notes"),
)
COMPARISON_NOTES = (
    "Difference: the mean of the optimizer minus the mean of the baseline.",
    "All tests are one-sided at 95%: p is small if the optimizer is better than the baseline.",
    "Paper: the paper's Student's t-test, which decides the verdict. Welch: Welch's t-test. Paired: t-test of the "
    "differences between runs with the same seed. The 95% interval is that of the paired test, two-sided.",
    "The p-values are not corrected for the number of comparisons.",
)
CROSSING_COLUMNS = (
    *PAIR_COLUMNS,
    text_column("steps", "steps"),
    text_column("seeds", "seeds that cross"),
    mean_column("step", "ahead from step"),
    mean_column("tokens", "tokens until then"),
    mean_column("share", "share of the run"),
    mean_column("difference", "difference at the end"),
)
CROSSING_NOTES = (
    "Ahead from step: the first validation from which the optimizer's validation loss stays below the baseline's with "
    "the same seed. Mean over the seeds that cross, with the standard deviation in parentheses.",
    "The step depends on the learning-rate schedule: a shorter run is not the start of a longer one.",
)


def pair_groups(rows: Sequence[Sequence[TableCell]]) -> int:
    """Number of `PAIR_COLUMNS` that group the rows: also the baseline, if there are many."""
    return 3 if len({row[2].text for row in rows}) > MOST_BASELINES else 2


def comparison_table(grid: Grid, lead: Lead = "loss") -> ReportTable:
    """Compare the pairs of each D and N: standard against all others, and Coupled Adam against its scaled forms, the
    rest of its family and SGD."""
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
                # Skip metrics that neither has, such as those of an untied input table.
                if any(value is not None for side in values for value in side.values()):
                    rows.append(_comparison_row(head, metric, compare(*values, metric.better)))
    return ReportTable("comparisons", "Comparisons", COMPARISON_COLUMNS, tuple(rows), COMPARISON_NOTES, groups=4)


def pairs_of(cells: Sequence[CellRuns]) -> list[tuple[int, int]]:
    """Indices of the cells of one size to compare: (baseline, optimizer)."""
    standard = baseline_places(cells)
    coupled = [place for place, cell in enumerate(cells) if cell.variant.role == "coupled"]
    rest = [place for place in range(len(cells)) if place not in (*standard, *coupled)]
    if not standard and not coupled:
        return [(rest[0], place) for place in rest[1:]]
    return [
        *baseline_pairs(cells),
        *((first, second) for first in coupled for second in rest),
        # Several of one role differ in something else, such as the coupled table.
        *itertools.combinations(standard, 2),
        *itertools.combinations(coupled, 2),
    ]


def _comparison_row(head: Sequence[str], metric: Metric, comparison: Comparison) -> tuple[TableCell, ...]:
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
        interval_cell(comparison.paired_interval, precise),
        number_cell(comparison.threshold, precise),
        *(number_cell(p, p_text) for p in (comparison.p_value, comparison.welch_p, comparison.paired_p)),
        TableCell(claim_text(comparison), bold=bool(comparison.significant or comparison.significantly_worse)),
        TableCell("; ".join(comparison.notes)),
    )


def summary_cell(metric: Metric, summary: Summary) -> TableCell:
    """Mean and standard deviation over the seeds of a cell."""
    return mean_cell(summary, lambda mean, std: metric.mean_text(mean, std, summary.count))


def interval_cell(interval: tuple[float, float] | None, text: Callable[[float], str]) -> TableCell:
    """Both ends of an interval; a dash for None."""
    if interval is None:
        return TableCell(MISSING, {"low": None, "high": None})
    low, high = interval
    return TableCell(f"{text(low)} to {text(high)}", {"low": low, "high": high})


def p_text(p: float) -> str:
    """A p-value in three decimals.

    Example:
        >>> p_text(0.0312), p_text(0.0000001)
        ('0.031', '<0.001')
    """
    return "<0.001" if p < 0.001 else fixed(p, 3)


def claim_text(comparison: Comparison) -> str:
    """Verdict of the paper's test on the optimizer against the baseline."""
    return "not significant" if comparison.outcome == "open" else comparison.outcome


@dataclass(frozen=True)
class Crossing:
    """Comparison of two curves of the validation loss."""

    step: int | None
    """The validation after which the second stays below the first; None if it is not below at the end."""
    last_step: int
    difference: float
    """Second minus first, at the end."""


def crossing(first: Curve, second: Curve) -> Crossing | None:
    """Find where the second curve falls below the first for good; None if the curves end at different steps.

    Such curves are incomplete, or have different batch sizes, so that their steps are not comparable.

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
    """Compare each standard optimizer with the others of its D and model, and Coupled Adam with the rest of its family.
    None if no two runs have logged a validation loss. Tied and untied standard optimizers are not compared: they are
    different models."""
    models = model_labels(grid.cells)
    rows = []
    uneven = []  # pairs with curves that end at different steps
    for place in grid.places:
        own, tokens = place.cells, place.cells[0].size.tokens
        names = optimizer_labels(own)
        for first, second in pairs_of(own):
            baseline, optimizer = own[first].variant, own[second].variant
            are_twins = optimizer.role == "standard" and own[first].size != own[second].size
            is_in_family = baseline.role == "coupled" and optimizer.role == "family"
            if are_twins or not (baseline.role == "standard" or is_in_family):
                continue
            head = (short(tokens), models[own[second].size], names[first], names[second])
            found, seeds = _crossings(own[first], own[second])
            if found:
                rows.append(_crossing_row(head, found, tokens))
            if seeds:
                uneven.append(f"{head[2]} and {head[3]} at {head[0]}, {head[1]} (seed {', '.join(map(str, seeds))})")
    if not rows:
        return None
    notes = (f"Omitted because their curves end at different steps: {'; '.join(uneven)}.",) if uneven else ()
    return ReportTable(
        "crossing",
        "When it overtakes the baseline",
        CROSSING_COLUMNS,
        tuple(rows),
        (*CROSSING_NOTES, *notes),
        groups=pair_groups(rows),
    )


def _crossings(first: CellRuns, second: CellRuns) -> tuple[list[Crossing], list[int]]:
    """The crossings of the common seeds, and the seeds whose curves end at different steps."""
    found, uneven = [], []
    for seed in sorted(first.runs.keys() & second.runs.keys()):
        curves = [curve_of(cell.runs[seed].run_folder, "val", "loss") for cell in (first, second)]
        each = crossing(*curves)
        if each is not None:
            found.append(each)
        elif all(curves):
            uneven.append(seed)
    return found, uneven


def _crossing_row(head: Sequence[str], found: Sequence[Crossing], tokens: int) -> tuple[TableCell, ...]:
    there = [(each.step, each.last_step) for each in found if each.step is not None]
    steps = summarise([float(step) for step, _ in there])
    shares = summarise([step / last for step, last in there])
    seen = summarise([tokens * step / last for step, last in there])
    return (
        *(TableCell(text) for text in head),
        TableCell(f"{max(each.last_step for each in found):,}"),
        TableCell(f"{len(there)} of {len(found)}"),
        _mean(steps, 0),
        mean_cell(seen, lambda mean, _: short(round(mean))),
        _mean(shares, 2),
        _mean(summarise([each.difference for each in found]), 3),
    )


def _mean(summary: Summary, decimals: int) -> TableCell:
    return mean_cell(summary, lambda mean, std: shorthand(mean, std, decimals))
