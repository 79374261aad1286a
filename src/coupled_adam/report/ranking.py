"""Optimizers ranked by loss, with the quality of their embeddings; and the settings selected for each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coupled_adam.base.notation import MISSING
from coupled_adam.base.text import fixed, setting, short
from coupled_adam.metrics import METRICS
from coupled_adam.report.grid import CellRuns, Grid, model_labels, optimizer_labels
from coupled_adam.report.pair_tables import summary_cell
from coupled_adam.report.result_notes import loss_note
from coupled_adam.report.shown_metrics import measured
from coupled_adam.report.significance import summarise
from coupled_adam.report.table_model import ReportTable, TableCell, mean_column, number_cell, number_column, text_column
from coupled_adam.study.results import Result
from coupled_adam.study.selection import at_edge
from coupled_adam.study.trials import VALIDATION_LOSS, edge_of

LEAST_RANKED = 3
SHOWN = tuple(METRICS[key] for key in ("loss", "r_cos", "iso", "mu_norm_ratio"))
D, N, OPTIMIZER = text_column("D", "D", "$D$"), text_column("N", "N", "$N$"), text_column("optimizer", "optimizer")


def ranked_cells(place: Grid) -> list[CellRuns]:
    """The cells of one D and model that have a loss, smallest mean first."""
    means = {cell.name: summarise(cell.values("loss").values()).mean for cell in place.cells}
    return sorted(
        (cell for cell in place.cells if means[cell.name] is not None), key=lambda cell: means[cell.name] or 0.0
    )


def ranking_table(grid: Grid) -> ReportTable | None:
    """Rank the optimizers of every D and model by mean loss; None if no place has enough of them."""
    places = [cells for place in grid.places if len(cells := ranked_cells(place)) >= LEAST_RANKED]
    if not places:
        return None
    runs = [run for cells in places for cell in cells for run in cell.runs.values()]
    shown = measured(SHOWN, (run.metrics for run in runs))
    models = model_labels(grid.cells)
    rows = [
        (
            TableCell(short(cell.size.tokens)),
            TableCell(models[cell.size]),
            TableCell(str(rank), {"value": rank}),
            TableCell(name),
            TableCell(str(len(cell.runs))),
            *(summary_cell(metric, summarise(cell.values(metric.key).values())) for metric in shown),
        )
        for cells in places
        for rank, (cell, name) in enumerate(zip(cells, optimizer_labels(cells), strict=True), 1)
    ]
    columns = (
        *(D, N, number_column("rank", "rank"), OPTIMIZER, text_column("seeds", "seeds")),
        *(mean_column(metric.key, metric.heading, metric.latex_heading) for metric in shown),
    )
    notes = ["Sorted by mean loss over the seeds. Neighbours may not differ significantly: see Comparisons."]
    note = loss_note(runs)
    notes += [note] if note else []
    return ReportTable("ranking", "Ranking", columns, tuple(rows), tuple(notes), groups=2)


def selection_table(candidates: Sequence[Result], reported: Sequence[Result]) -> ReportTable | None:
    """List every value tried for a setting, with its validation loss; None if nothing was selected.

    Args:
        candidates: the runs that select a setting.
        reported: the runs that use a winner.
    """
    groups: dict[str, list[Result]] = {}
    for run in candidates:
        if run.trial is not None:
            groups.setdefault(run.trial.of, []).append(run)
    if not groups:
        return None
    decided = {run.trial.of: run for run in reported if run.trial is not None}
    rows = []
    at_edges: dict[tuple[str, str], list[str]] = {}  # size and statement -> optimizers
    for of, runs in groups.items():
        runs = sorted(runs, key=_value)
        trial = decided[of].trial if of in decided else None
        winner = trial.value if trial is not None else None
        rows += list(_rows(runs, winner))
        edge = None if winner is None else edge_of(winner, [_value(run) for run in runs])
        if trial is not None and winner is not None and edge:
            size = f"({short(decided[of].tokens)}, {runs[0].model})"
            statement = f"{trial.key} = {setting(winner)} is {at_edge(edge)}."
            at_edges.setdefault((size, statement), []).append(runs[0].optimizer)
    notes = [
        "The winner has the lowest validation loss with a seed that is not reported. Every optimizer tries the same "
        "number of values, plus those added beyond the smallest or largest one.",
        *(f"{', '.join(names)} {size}: {statement}" for (size, statement), names in at_edges.items()),
    ]
    if any(run.tokens < decided[of].tokens for of, runs in groups.items() if of in decided for run in runs):
        notes.append("Candidates train on fewer tokens (D) than the reported runs, whose best value may differ.")
    columns = (
        *(D, N, OPTIMIZER, text_column("setting", "setting"), number_column("value", "value")),
        *(number_column(VALIDATION_LOSS, METRICS[VALIDATION_LOSS].heading), text_column("winner", "winner")),
    )
    return ReportTable("selection", "Selected settings", columns, tuple(rows), tuple(notes), groups=3)


def selection_by_value(table: ReportTable) -> ReportTable:
    """The table `selection` for the page: a row per optimizer, a column per value, the winner's loss in bold."""
    keys = [column.key for column in table.columns]
    rows = [dict(zip(keys, row, strict=True)) for row in table.rows]
    # The values in ascending order, the same for all optimizers.
    values = {row["value"].text: row["value"].numbers["value"] or 0.0 for row in rows}
    texts = sorted(values, key=values.__getitem__)
    tried: dict[tuple[tuple[str, ...], int], dict[str, TableCell]] = {}
    seen: Counter[tuple[str, ...]] = Counter()  # merged studies can have the same trial twice: then there are two rows
    for row in rows:
        place = tuple(row[key].text for key in ("D", "N", "setting", "optimizer"))
        times = seen[*place, row["value"].text]
        seen[*place, row["value"].text] += 1
        own, mark = tried.setdefault((place, times), {}), row["winner"].text
        own[row["value"].text] = replace(row[VALIDATION_LOSS], bold=bool(mark))
        if mark:
            own["winner"] = TableCell(mark.replace("winner", row["value"].text))
    columns = (
        *(D, N, text_column("setting", "setting"), OPTIMIZER),
        *(number_column(f"value_{text}", text) for text in texts),
        text_column("winner", "selected"),
    )
    by_value = tuple(
        (*map(TableCell, place), *(own.get(key, TableCell("")) for key in (*texts, "winner")))
        for (place, _), own in tried.items()
    )
    notes = (f"{METRICS[VALIDATION_LOSS].label.capitalize()} of every value tried.", *table.notes)
    return ReportTable(table.name, table.title, columns, by_value, notes, groups=3)


def _rows(runs: Sequence[Result], winner: float | None) -> Iterator[tuple[TableCell, ...]]:
    edge = None if winner is None else edge_of(winner, [_value(run) for run in runs])
    for run in runs:
        assert run.trial is not None
        is_winner = run.trial.value == winner
        loss = number_cell(
            run.metrics.get(VALIDATION_LOSS), METRICS[VALIDATION_LOSS].text, lambda value: fixed(value, 4)
        )
        mark = f"winner, at the {edge} edge" if is_winner and edge else "winner" if is_winner else ""
        yield (
            *map(TableCell, (short(run.tokens), run.model, run.optimizer, run.trial.key)),
            TableCell(setting(_value(run)), {"value": _value(run)}),
            TableCell("diverged") if loss.text == MISSING else loss,
            TableCell(mark),
        )


def _value(run: Result) -> float:
    assert run.trial is not None
    return run.trial.value or 0.0
