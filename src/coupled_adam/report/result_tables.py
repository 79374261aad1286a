"""The tables of a study, in the form of the paper's tables and with the paper's values.

Every table is built from the finished runs and the plan, if any, as a `ReportTable`, which can be written in any
format. Missing cells and seeds are shown as missing; a metric that no run has is named in a note.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coupled_adam.base.files import require_writable, write_whole
from coupled_adam.base.text import counted, setting, short
from coupled_adam.config.study_sections import DEFAULT_REPORT, ReportSection
from coupled_adam.metrics import INPUT_PREFIX, MAIN, METRICS, OTHERS, QUANTISED_LOSSES, TASKS, Metric, other_tasks
from coupled_adam.report.ablation_groups import scale_groups, sgd_groups
from coupled_adam.report.frequency_table import frequency_table
from coupled_adam.report.grid import CellRuns, Grid, model_labels, optimizer_labels, sizes_of
from coupled_adam.report.learning_rates import sensitivity_table
from coupled_adam.report.pair_tables import comparison_table, crossing_table, summary_cell
from coupled_adam.report.primary_comparisons import PrimaryComparison, primary_comparisons
from coupled_adam.report.primary_table import primary_table
from coupled_adam.report.published import (
    ALL_TABLES,
    SCALE_TABLES,
    SGD_BEST_TABLES,
    SGD_SEARCH_TABLES,
    find_published,
)
from coupled_adam.report.ranking import ranking_table, selection_table
from coupled_adam.report.result_notes import limit_note, loss_note, loss_splits, table_note
from coupled_adam.report.runs_table import runs_table
from coupled_adam.report.shown_metrics import in_order, measured, named
from coupled_adam.report.significance import better_than_all, summarise
from coupled_adam.report.table_formats import FORMATS
from coupled_adam.report.table_model import Column, ReportTable, TableCell, text_column
from coupled_adam.report.theory_table import theory_table
from coupled_adam.study.results import Result

FOLDER = "tables"
NAMES = (
    *("main", "primary", "ranking", "learning_rates", "selection", "downstream", "further", "scale"),
    *("scale_downstream", "sgd_search", "sgd_best", "sgd_best_downstream", "loss_by_frequency", "quantised"),
    *("crossing", "theory", "comparisons", "runs"),
)
ABOUT_THE_LOSS = (
    *("main", "primary", "ranking", "learning_rates", "scale", "sgd_search", "sgd_best", "loss_by_frequency"),
    *("quantised", "crossing", "comparisons"),
)
DOWNSTREAM = (*TASKS, METRICS["acc"])
FURTHER = (*OTHERS, *(metric for key, metric in METRICS.items() if key.startswith(INPUT_PREFIX)))

D, N, SEEDS = text_column("D", "D", "$D$"), text_column("N", "N", "$N$"), text_column("seeds", "seeds")
NONE = "no run has a value"
MOST_NAMED = 4
OPTIMIZER = text_column("optimizer", "optimizer")
EXPONENT = text_column("n", "n", "$n$")


def build_tables(
    grid: Grid,
    report: ReportSection = DEFAULT_REPORT,
    candidates: Sequence[Result] = (),
    primary: Sequence[PrimaryComparison] | None = None,
) -> list[ReportTable]:
    """Build every table that the runs have data for.

    Args:
        grid: the finished runs and the expected cells.
        report: which metrics come first, and a note on the loss.
        candidates: the runs that select a setting, which are not part of the grid.
        primary: the primary comparisons of the grid; computed by default.

    Returns:
        The tables by their names: main, primary (with a standard optimizer), ranking (three optimizers or more),
        learning_rates (over lr), selection, downstream (with task results), further, scale (over n), sgd_search and
        sgd_best (over f), loss_by_frequency, quantised, crossing, theory, comparisons, runs. Empty without runs and
        plan.
    """
    if not grid.cells:
        return []
    scaled = scale_groups(grid.cells)
    searched, best, choices = sgd_groups(grid.cells)
    groups = [place.cells for place in grid.places]
    metrics = in_order(MAIN, report.lead)
    tables = [
        metric_table("main", "Results", groups, metrics, ALL_TABLES),
        primary_table(grid, primary_comparisons(grid) if primary is None else primary),
        ranking_table(grid),
        sensitivity_table(grid),
        selection_table(candidates, grid.results),
        downstream_table("downstream", "Results: downstream tasks", groups, ALL_TABLES),
        further_table(groups),
        metric_table("scale", "Scaled Coupled Adam", scaled, metrics, SCALE_TABLES, EXPONENT),
        downstream_table("scale_downstream", "Scaled Coupled Adam: downstream tasks", scaled, SCALE_TABLES, EXPONENT),
        metric_table("sgd_search", "SGD: the search for f", searched, metrics, SGD_SEARCH_TABLES),
        metric_table(
            "sgd_best", "SGD with the best f, and Coupled Adam", best, metrics, SGD_BEST_TABLES, notes=choices
        ),
        downstream_table("sgd_best_downstream", "SGD with the best f: downstream tasks", best, SGD_BEST_TABLES),
        frequency_table(grid),
        quantised_table(groups),
        crossing_table(grid),
        theory_table(grid),
        comparison_table(grid, report.lead),
        runs_table(grid, report.lead),
    ]
    return [_with_loss_note(table, report.loss_note) for table in tables if table is not None and table.rows]


def _with_loss_note(table: ReportTable, note: str | None) -> ReportTable:
    """Add the study's note on the loss to tables that show a loss."""
    return replace(table, notes=(*table.notes, note)) if note and table.name in ABOUT_THE_LOSS else table


def write_tables(tables: Sequence[ReportTable], folder: Path) -> list[Path]:
    """Write every table as CSV, Markdown and LaTeX.

    Files are written atomically; files of other tables are removed.

    Args:
        tables: from `build_tables`.
        folder: created if missing.

    Returns:
        The files written.
    """
    by_name = {table.name: table for table in tables}
    written = []
    for name in NAMES:
        for suffix, render in FORMATS.items():
            path = folder / f"{name}{suffix}"
            if name in by_name:
                require_writable(path)
                write_whole(path, render(by_name[name]))
                written.append(path)
            else:
                path.unlink(missing_ok=True)
    return written


def metric_table(
    name: str,
    title: str,
    groups: Sequence[Sequence[CellRuns]],
    metrics: Sequence[Metric],
    published: Sequence[str],
    label: Column = OPTIMIZER,
    notes: Sequence[str] = (),
    seeds_of: Sequence[Metric] = (),
) -> ReportTable | None:
    """Means over the seeds, one row per cell, the best of each group in bold; None without groups.

    Args:
        name: of the files.
        title: of the table.
        groups: the cells to compare with each other, one group per size.
        metrics: the columns; those that no run has are omitted and named in a note.
        published: the paper's tables to take published values from.
        label: the column that distinguishes the cells of a group.
        notes: additional notes.
        seeds_of: count only the seeds with one of these metrics; by default, all finished ones.
    """
    if not groups:
        return None
    cells = [cell for group in groups for cell in group]
    runs = [run for cell in cells for run in cell.runs.values()]
    shown = measured(metrics, (run.metrics for run in runs))
    splits = loss_splits(runs)
    models = model_labels(cells)
    rows = [
        (TableCell(short(cell.size.tokens)), TableCell(models[cell.size]), *row)
        for group in groups
        for cell, row in zip(group, group_rows(group, shown, published, label, seeds_of), strict=True)
    ]
    values = [column_of(named(metric, splits), [row[4 + place] for row in rows]) for place, metric in enumerate(shown)]
    table = ReportTable(name, title, (D, N, label, SEEDS, *values), tuple(rows), groups=1 if mixes_sizes(groups) else 2)
    return replace(table, notes=(*notes_on(table, groups, metrics, shown, seeds_of), *notes))


def downstream_table(
    name: str, title: str, groups: Sequence[Sequence[CellRuns]], published: Sequence[str], label: Column = OPTIMIZER
) -> ReportTable | None:
    """The paper's tasks and their mean, then other tasks; None if no run has a task."""
    found = [run.metrics for group in groups for cell in group for run in cell.runs.values()]
    others = other_tasks(found)
    tasks = measured((*TASKS, *others), found)
    if not tasks:
        return None
    return metric_table(name, title, groups, (*DOWNSTREAM, *others), published, label, seeds_of=tasks)


def quantised_table(groups: Sequence[Sequence[CellRuns]]) -> ReportTable | None:
    """The test loss with and without quantised vocabulary tables; None if not measured."""
    if not measured(
        QUANTISED_LOSSES, (run.metrics for group in groups for cell in group for run in cell.runs.values())
    ):
        return None
    metrics = (METRICS["loss"], *QUANTISED_LOSSES)
    title = "Test loss with the table rounded to integers"
    return metric_table("quantised", title, groups, metrics, (), seeds_of=QUANTISED_LOSSES)


def further_table(groups: Sequence[Sequence[CellRuns]]) -> ReportTable | None:
    """Measures that are not in the paper's tables; None if no run has any."""
    found = measured(FURTHER, (run.metrics for group in groups for cell in group for run in cell.runs.values()))
    return metric_table("further", "Further measures", groups, found, ()) if found else None


def group_rows(
    group: Sequence[CellRuns],
    metrics: Sequence[Metric],
    published: Sequence[str],
    label: Column,
    seeds_of: Sequence[Metric],
) -> list[tuple[TableCell, ...]]:
    """Label, seeds and values of the cells of one size; values significantly better than all others are bold."""
    names = exponent_labels(group) if label is EXPONENT else optimizer_labels(group)
    winners = {
        metric.key: better_than_all(
            {str(place): cell.values(metric.key) for place, cell in enumerate(group)}, metric.better
        )
        for metric in metrics
    }
    return [
        (
            TableCell(name),
            TableCell(seeds_text(cell, seeds_of)),
            *(value_cell(cell, metric, published, bold=winners[metric.key] == str(place)) for metric in metrics),
        )
        for place, (cell, name) in enumerate(zip(group, names, strict=True))
    ]


def mixes_sizes(groups: Sequence[Sequence[CellRuns]]) -> bool:
    """Whether a group has models of different N: tied and untied ones of the same name."""
    return any(len(sizes_of(group)) > 1 for group in groups)


def exponent_labels(group: Sequence[CellRuns]) -> list[str]:
    """n of every cell, with the optimizer's name if two cells have the same n."""
    counts = Counter(cell.variant.n for cell in group)
    return [
        setting(cell.variant.n) + ("" if counts[cell.variant.n] == 1 else f" ({cell.variant.name})") for cell in group
    ]


def value_cell(cell: CellRuns, metric: Metric, published: Sequence[str], *, bold: bool) -> TableCell:
    """Mean and standard deviation of one metric in one cell, with the paper's value."""
    summary = summarise(cell.values(metric.key).values())
    shown = summary_cell(metric, summary)
    return replace(
        shown,
        numbers={**shown.numbers, "bold": int(bold)},
        bold=bold,
        published=find_published(metric.key, cell.size.tokens, cell.size.parameters, cell.variant.settings, published),
        note=_note_on(summary.count, len(cell.runs)) if summary.left_out else "",
    )


def _note_on(count: int, runs: int) -> str:
    return f"{count} of {runs} have it" if count else NONE


def _in_brackets(note: str) -> str:
    return "" if note == NONE else f" ({note})"


def seed_count(cell: CellRuns, metrics: Sequence[Metric]) -> int:
    """Number of finished seeds with one of the metrics; without metrics, of all finished seeds."""
    runs = cell.runs.values()
    return sum(bool(measured(metrics, [run.metrics])) for run in runs) if metrics else len(runs)


def seeds_text(cell: CellRuns, metrics: Sequence[Metric]) -> str:
    """Number of seeds as counted by `seed_count`, and if some are missing, of expected ones."""
    there, wanted = seed_count(cell, metrics), len(cell.seeds)
    return str(there) if there == wanted else f"{there} of {wanted}"


def column_of(metric: Metric, cells: Sequence[TableCell]) -> Column:
    """The column of one metric."""
    return Column(
        metric.key,
        metric.heading,
        metric.latex_heading,
        numbers=("mean", "std", "seeds", "bold"),
        published=any(cell.published for cell in cells),
    )


def named_cells(cells: Sequence[tuple[str, str]]) -> str:
    """Name cells by their optimizers and sizes: all of them if they are few, otherwise each optimizer once, or only
    their number.

    Example:
        >>> named_cells([("coupled", "5B, 125M"), ("sgd", "5B, 125M")])
        'coupled at 5B, 125M; sgd at 5B, 125M'
        >>> named_cells([("sgd", f"{size}B, 125M") for size in (1, 2, 5, 10, 20)])
        'sgd (5 sizes)'
    """
    if len(cells) <= MOST_NAMED:
        return "; ".join(f"{optimizer} at {size}" for optimizer, size in cells)
    counts = Counter(optimizer for optimizer, _ in cells)
    if len(counts) > MOST_NAMED:
        return f"{len(cells)} cells of {len(counts)} optimizers"
    return "; ".join(f"{optimizer} ({counted(count, 'size')})" for optimizer, count in counts.items())


def single_seeds(groups: Sequence[Sequence[CellRuns]], metrics: Sequence[Metric]) -> list[tuple[str, str]]:
    """Optimizer and size of cells with one seed. The cells compared with them cannot be bold."""
    models = model_labels([cell for group in groups for cell in group])
    return [
        (name, f"{short(cell.size.tokens)}, {models[cell.size]}")
        for group in groups
        if sum(bool(seed_count(cell, metrics)) for cell in group) > 1
        for cell, name in zip(group, optimizer_labels(group), strict=True)
        if seed_count(cell, metrics) == 1
    ]


def notes_on(
    table: ReportTable,
    groups: Sequence[Sequence[CellRuns]],
    wanted: Sequence[Metric],
    shown: Sequence[Metric],
    seeds_of: Sequence[Metric],
) -> list[str]:
    """Notes below a table."""
    notes = ["Mean over the seeds, with the standard deviation in parentheses: 0.123(4) is 0.123 ± 0.004."]
    cells = [cell for group in groups for cell in group]
    if max(map(len, groups)) == 1:
        notes.append("One optimizer per size: there is nothing to compare, and nothing is bold.")
    elif max(seed_count(cell, seeds_of) for cell in cells) > 1:
        same = "model, tied or not" if mixes_sizes(groups) else "N"
        others = "the other optimizer" if max(map(len, groups)) == 2 else "all other optimizers"
        notes.append(
            f"Bold: significantly better than {others} at the same D and {same}, "
            "by the paper's one-sided Student's t-test at 95%."
        )
        single = single_seeds(groups, seeds_of)
        if single:
            notes.append(
                "Nothing is bold in groups where an optimizer has only one seed, because it cannot be tested: "
                f"{named_cells(single)}."
            )
    else:
        notes.append("One seed each: no claim is possible, and nothing is bold.")
    if any(column.published for column in table.columns):
        notes.append("In brackets: the paper's value for this D, N and optimizer; text and settings may differ.")
    note = loss_note(run for cell in cells for run in cell.runs.values())
    if note and "loss" in {metric.key for metric in shown}:
        notes.append(note)
    note = limit_note(run for cell in cells for run in cell.runs.values())
    if note and {metric.key for metric in shown} & {metric.key for metric in DOWNSTREAM}:
        notes.append(note)
    note = table_note(run for cell in cells for run in cell.runs.values())
    if note and any(metric in MAIN and metric.of_table for metric in shown):
        notes.append(note)
    unmeasured = [metric.symbol for metric in wanted if metric not in shown]
    if unmeasured:
        notes.append(f"Not measured in any run: {', '.join(unmeasured)}.")
    missing = sum(len(cell.seeds) - len(cell.runs) for cell in cells)
    if missing:
        notes.append(f"Missing runs: {missing} of {sum(len(cell.seeds) for cell in cells)}.")
    # Group columns that are missing in the same cells: all seven tasks are evaluated, or none.
    lacking: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for place, column in enumerate(table.columns):
        short_of = tuple(
            (row[2].text, f"{row[0].text}, {row[1].text}{_in_brackets(row[place].note)}")
            for row in table.rows
            if row[place].note
        )
        if short_of:
            lacking.setdefault(short_of, []).append(column.label)
    for places, labels in lacking.items():
        verb = "is" if len(labels) == 1 else "are"
        notes.append(f"{', '.join(labels)} {verb} missing in finished runs of: {named_cells(places)}.")
    return notes
