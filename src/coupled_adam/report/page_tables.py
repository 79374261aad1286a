"""Tables of the page: rows under a heading that names their group, and a link to the folder of each run.

Grouping columns become headings, because on a phone they would fill the screen.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup, escape

from coupled_adam.base.notation import MISSING, to_html
from coupled_adam.base.text import short
from coupled_adam.config.study_sections import DEFAULT_REPORT, ReportSection
from coupled_adam.metrics import MAIN, METRICS, PROGRESS, Metric
from coupled_adam.report.grid import Grid
from coupled_adam.report.pair_tables import claim_text, p_text, summary_cell
from coupled_adam.report.published import find_published
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.shown_metrics import in_order
from coupled_adam.report.significance import better_than_all, summarise
from coupled_adam.report.table_model import Column, ReportTable, TableCell
from coupled_adam.study.results import Result

# The order if the loss leads; otherwise the embeddings come first.
HEADLINE = ("loss", "acc", "mu_norm_ratio", "iso", "mu_norm", "r_cos", "rho_log", "kappa")
MOST_SIDE_BY_SIDE = 3


@dataclass(frozen=True)
class PageCell:
    """One cell of an HTML table."""

    html: Markup
    kind: str
    """CSS classes: number, text, or text prose for sentences, which are wrapped."""


@dataclass(frozen=True)
class PageGroup:
    """Rows under one heading."""

    heading: str
    rows: Sequence[Sequence[PageCell]]


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    name: str
    title: str
    head: Sequence[PageCell]
    groups: Sequence[PageGroup]
    notes: Sequence[str]


@dataclass(frozen=True)
class HeadlineRow:
    """One metric of all optimizers."""

    label: str
    meaning: str
    cells: Sequence[Markup]
    claim: str
    """Verdict of the test on the second against the first."""
    p_value: str
    values: Mapping[str, Sequence[float | None]]
    """Values of every seed, by the name of the optimizer in the study."""
    note: str = ""
    """Caveat for the reader."""


@dataclass(frozen=True)
class Headline:
    """The main table of a study with one D and one model: one row per metric, one column per optimizer."""

    optimizers: Sequence[str]
    rows: Sequence[HeadlineRow]
    has_published: bool
    """Whether values of the paper are shown below the measured ones."""


def headline(grid: Grid, report: ReportSection = DEFAULT_REPORT) -> Headline | None:
    """Make the main table; None for several sizes or too many optimizers.

    Args:
        grid: of the finished runs.
        report: which metrics come first, and a note on the loss.
    """
    found = grid.variants
    sizes_of = {each: grid.sizes_of(each) for each in found}
    several = len(grid.finished.places) > 1 or any(len(own) > 1 for own in sizes_of.values())
    if several or len(found) > MOST_SIDE_BY_SIDE:
        return None
    size = {each: own[0] for each, own in sizes_of.items()}
    pair = grid.main_pair if len(found) == 2 else None
    rows, has_published = [], False
    for metric in in_order((METRICS[key] for key in HEADLINE), report.lead):
        values = {each: list(grid.values_of(size[each], each, metric.key).values()) for each in found}
        summaries = {each: summarise(seeds) for each, seeds in values.items()}
        if all(summary.mean is None for summary in summaries.values()):
            continue
        comparison, wins = None, {}
        if pair is not None:
            comparison = grid.compare(size[pair[0]], *pair, metric.key, size[pair[1]])
        if pair is not None and comparison is not None:
            wins = {pair[0]: comparison.significantly_worse, pair[1]: comparison.significant}
        elif len(found) > 2:
            best = better_than_all({each.name: seeds for each, seeds in values.items()}, metric.better)
            wins = {each: each.name == best for each in found}
        cells = []
        for variant, summary in summaries.items():
            own = size[variant]
            published = find_published(metric.key, own.tokens, own.parameters, variant.settings)
            has_published = has_published or published is not None
            shown = TableCell(summary_cell(metric, summary).text, bold=bool(wins.get(variant)), published=published)
            cells.append(cell_html(shown))
        p_value = "" if comparison is None or comparison.p_value is None else p_of_claim(comparison.p_value)
        claim = "" if comparison is None else claim_text(comparison)
        label, meaning = label_and_meaning(metric, grid.results)
        note = (report.loss_note or "") if metric.key == "loss" else ""
        seeds = {each.name: of_each for each, of_each in values.items()}
        rows.append(HeadlineRow(label, meaning, cells, claim, p_value, seeds, note))
    differ = len(set(size.values())) > 1
    names = [f"{each.label}, N = {short(size[each].parameters)}" if differ else each.label for each in found]
    return Headline(names, rows, has_published)


def label_and_meaning(metric: Metric, results: Sequence[Result]) -> tuple[str, str]:
    """The name of a metric with its arrow, and a short explanation."""
    label = loss_name(results) if metric.key == "loss" else metric.label
    return f"{label}\N{NO-BREAK SPACE}{metric.arrow}", metric.meaning


def page_table(table: ReportTable, links: Mapping[str, str]) -> PageTable:
    """Convert a table for the page.

    Args:
        table: any. The table of all runs keeps only columns that differ; its first column links to the run folders.
        links: addresses of run folders by the text of the column `run`.
    """
    places = list(range(table.groups, len(table.columns)))
    run = next((place for place in places if table.columns[place].key == "run"), None)
    notes = list(table.notes)
    if run is not None:
        places = [place for place in places if _is_worth_a_column(table, place)]
        notes.append("The seed links to the run folder. All measures are in tables/runs.csv.")
    kinds = {place: _kind(table.columns[place]) for place in places}
    groups: dict[str, list[list[PageCell]]] = {}
    for row in table.rows:
        cells = [PageCell(cell_html(row[place]), kinds[place]) for place in places]
        if run is not None and row[run].text in links:
            link = Markup('<a href="{}">{}</a>').format(links[row[run].text], cells[0].html)
            cells[0] = PageCell(link, cells[0].kind)
        groups.setdefault(_heading(table, row), []).append(cells)
    head = [PageCell(escape(table.columns[place].label), kinds[place]) for place in places]
    return PageTable(table.name, table.title, head, [PageGroup(*group) for group in groups.items()], notes)


def _kind(column: Column) -> str:
    return "number" if column.numbers else "text prose" if column.key == "notes" else "text"


def _heading(table: ReportTable, row: Sequence[TableCell]) -> str:
    """The grouping columns of a row as one line, such as "D = 82M, N = 30M, coupled against standard"."""
    named = {column.key: cell.text for column, cell in zip(table.columns[: table.groups], row, strict=False)}
    against = f"against {named.pop('baseline')}" if "baseline" in named else ""
    optimizer = named.pop("optimizer", "")
    parts = [f"{key} = {text}" if key in "DN" else text for key, text in named.items()]
    return ", ".join(filter(None, [*parts, f"{optimizer} {against}".strip()]))


def _is_worth_a_column(table: ReportTable, place: int) -> bool:
    """Whether the table of all runs keeps a column: not the folder, which is a link, nor measures beyond the paper's,
    nor values that are the same for all runs, which the page shows elsewhere."""
    column = table.columns[place]
    metric = METRICS.get(column.key)
    if metric is not None and metric not in PROGRESS:
        return metric in MAIN
    if column.key in ("seed", "seconds", "config_hash"):
        return True
    return column.key != "run" and len({row[place].text for row in table.rows} - {MISSING}) > 1


def cell_html(cell: TableCell) -> Markup:
    """A value, with the published one below it."""
    html = Markup(to_html(cell.text, bold=cell.bold))  # escapes text
    if cell.published is None:
        return html
    return html + Markup(f'<span class="published">{to_html(cell.published.text, bold=cell.published.bold)}</span>')


def run_links(results: Sequence[Result], out: Path) -> dict[str, str]:
    """Links to run folders, relative to the report. If two folders have a run of the same name, the first wins."""
    return {result.run: address(result.run_folder, out) for result in reversed(results)}


def address(path: Path, start: Path) -> str:
    """A relative link, with special characters quoted, such as the colon of `javascript:`.

    Example:
        >>> address(Path("runs/demo/a b"), Path("runs/demo"))
        './a%20b/'
    """
    return f"./{quote(Path(os.path.relpath(path, start)).as_posix())}/"


def p_of_claim(p: float) -> str:
    """The p-value of the verdict: p if the second is better, 1 - p if it is worse."""
    return p_text(min(p, 1 - p))
