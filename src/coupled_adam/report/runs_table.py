"""Every run of a study: its metrics, its cost, and what is needed to reproduce it."""

from collections.abc import Callable, Sequence

from coupled_adam.base.notation import MISSING
from coupled_adam.base.text import counted, duration, energy, short, shorthand
from coupled_adam.metrics import METRICS, Lead, Metric
from coupled_adam.report.grid import Grid, model_labels, optimizer_labels
from coupled_adam.report.result_notes import loss_splits
from coupled_adam.report.shown_metrics import in_order, measured, named
from coupled_adam.report.table_model import ReportTable, TableCell, number_cell, number_column, text_column
from coupled_adam.study.results import Result

COSTS: tuple[tuple[str, str, Callable[[Result], float | None], Callable[[float], str]], ...] = (
    ("seconds", "time", lambda run: run.seconds, duration),
    ("tokens_per_second", METRICS["tokens_per_second"].symbol, lambda run: run.tokens_per_second, short),
    ("energy_joules", "energy", lambda run: run.energy_joules, energy),
)
ORIGINS: tuple[tuple[str, str, Callable[[Result], str | None]], ...] = (
    ("device", "device", lambda run: run.device),
    ("torch", "torch", lambda run: run.torch),
    ("package", "coupled-adam", lambda run: run.package),
    ("commit", "commit", lambda run: run.commit),
    ("config_hash", "settings", lambda run: run.config_hash),
    ("run", "folder", lambda run: run.run),
)


def runs_table(grid: Grid, lead: Lead = "loss") -> ReportTable:
    """One row per seed of every cell; a seed without a finished run has dashes."""
    cells = grid.cells
    splits = loss_splits(grid.results)
    shown = measured(in_order(METRICS.values(), lead), (run.metrics for run in grid.results))
    metrics = [named(metric, splits) for metric in shown]
    columns = (
        text_column("D", "D", "$D$"),
        text_column("N", "N", "$N$"),
        text_column("optimizer", "optimizer"),
        text_column("seed", "seed"),
        *(number_column(metric.key, metric.heading, metric.latex_heading) for metric in metrics),
        *(number_column(key, label) for key, label, *_ in COSTS),
        *(text_column(key, label) for key, label, _ in ORIGINS),
    )
    models = model_labels(cells)
    rows = [
        _row(cell.runs.get(seed), (short(cell.size.tokens), models[cell.size], label, str(seed)), metrics)
        for cell, label in zip(cells, optimizer_labels(cells), strict=True)
        for seed in cell.seeds
    ]
    missing = sum(seed not in cell.runs for cell in cells for seed in cell.seeds)
    notes = (f"Missing: {missing} of {counted(len(rows), 'run')}, shown as rows of dashes.",) if missing else ()
    return ReportTable("runs", "Every run", columns, tuple(rows), notes, groups=3)


def _row(run: Result | None, names: Sequence[str], metrics: Sequence[Metric]) -> tuple[TableCell, ...]:
    head = tuple(TableCell(name) for name in names)
    if run is None:
        return head + (TableCell(MISSING),) * (len(metrics) + len(COSTS) + len(ORIGINS))
    values = tuple(value_cell(run.metrics.get(metric.key), metric) for metric in metrics)
    costs = tuple(number_cell(read(run), text, lambda value: f"{round(value):,}") for *_, read, text in COSTS)
    return head + values + costs + tuple(TableCell(read(run) or MISSING) for _, _, read in ORIGINS)


def value_cell(value: float | None, metric: Metric) -> TableCell:
    """One number of one run."""
    return number_cell(value, metric.text, lambda number: shorthand(number, None, metric.decimals + 2))
