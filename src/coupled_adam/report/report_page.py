"""The page of a study's report.

Figures and table cells are inserted as HTML; the code that makes them escapes text. The page runs only its own script
and forbids any other. Needs jinja2 and matplotlib.
"""

import base64
import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from coupled_adam import __version__
from coupled_adam.base.captioned_figure import CaptionedFigure
from coupled_adam.base.extras import install_command
from coupled_adam.base.page import render_template
from coupled_adam.base.text import counted, duration, energy, short
from coupled_adam.config.builtin_files import STUDY_FILE
from coupled_adam.metrics import TASKS, other_tasks
from coupled_adam.report.contents import Contents
from coupled_adam.report.figures.figure_list import BESIDE_TABLES, MAIN_PICTURE, OVER_TRAINING
from coupled_adam.report.figures.style import looks
from coupled_adam.report.grid import Grid
from coupled_adam.report.key_numbers import key_numbers, strip
from coupled_adam.report.page_data import clouds_data, curves_data, curves_note
from coupled_adam.report.page_tables import PageTable, headline, page_table, run_links
from coupled_adam.report.ranking import selection_by_value
from coupled_adam.report.result_notes import limit_note, loss_note, table_note
from coupled_adam.report.shown_metrics import measured
from coupled_adam.report.study_plans import StudyPlan, Unfinished
from coupled_adam.study.folder import TO_BE_MEASURED
from coupled_adam.study.results import Result

TEMPLATE = Path(__file__).with_name("report.html.jinja")
# Statuses of runs without a result, most advanced first.
FURTHEST = ("just finished", "running", TO_BE_MEASURED, "failed", "stopped", "waiting")
# Long tables that few readers need: collapsed, and opened for printing.
FOLDED = ("further", "selection", "loss_by_frequency", "comparisons", "runs")


@dataclass(frozen=True)
class Completeness:
    """Number of finished and planned runs."""

    finished: int
    planned: int

    @property
    def is_partial(self) -> bool:
        """Whether something is missing."""
        return self.finished < self.planned


def render_report(contents: Contents, figures: Sequence[CaptionedFigure], out: Path) -> str:
    """Render the page as HTML.

    Args:
        contents: of the report.
        figures: of the report.
        out: folder of the page; links to run folders and files are relative to it.
    """
    grid, plans, results = contents.grid, contents.plans, contents.grid.results
    links = run_links(results, out)
    tables = [
        page_table(selection_by_value(table) if table.name == "selection" else table, links)
        for table in contents.tables
    ]
    numbers, side_by_side = key_numbers(grid, contents.section), headline(grid, contents.section)
    main_table = _main_table(tables, grid) if side_by_side is None else None
    # Do not repeat a table of the first screen; if that has the same numbers in another form, collapse the table.
    folded = [*FOLDED, "main"] if side_by_side is not None else FOLDED
    below = [table for table in tables if main_table is None or table.name != main_table.name]
    beside = {
        table.name: figure for table in below for figure in figures if BESIDE_TABLES.get(table.name) == figure.name
    }
    elsewhere = (MAIN_PICTURE, *OVER_TRAINING, *(figure.name for figure in beside.values()))
    colours = {name: look.colour for name, look in looks(grid.variants).items()}
    unfinished = merge_unfinished(plans)
    script = TEMPLATE.with_name("report.js").read_text(encoding="utf-8")
    return render_template(
        TEMPLATE,
        title=" + ".join(dict.fromkeys(plan.title for plan in plans)),
        descriptions=[plan.description for plan in plans if plan.description],
        compared=what_was_compared(grid),
        has_family=any(variant.role == "family" for variant in grid.variants),
        verdict=contents.verdict,
        key_numbers=numbers,
        headline=side_by_side,
        strip=strip,
        colours=colours,
        table_note=table_note(results),
        loss_note=loss_note(results),
        limit_note=limit_note(run for run in results if run.metrics.get("acc") is not None),
        main_table=main_table,
        tables=[table for table in below if table.name not in folded],
        folded=[table for table in below if table.name in folded],
        main_picture=next((figure for figure in figures if figure.name == MAIN_PICTURE), None),
        curve_figures=[figure for figure in figures if figure.name in OVER_TRAINING],
        figures=[figure for figure in figures if figure.name not in elsewhere],
        beside=beside,
        progress=Completeness(len(results), len(results) + len(unfinished)),
        unfinished=unfinished,
        problems=[plan.problem for plan in plans if plan.problem],
        clouds=clouds_data(grid),
        curves=curves_data(grid),
        curves_note=curves_note(grid),
        commands=commands(plans, results, out),
        facts=facts(results),
        plans=plans,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def what_was_compared(grid: Grid) -> list[str]:
    """Summarise the study in short phrases: optimizers, models, data, seeds, selected settings."""
    optimizers = [variant.label for variant in grid.variants]
    named = optimizers if len(optimizers) <= 4 else [optimizers[0], "…", optimizers[-1]]
    models = sorted({(size.parameters, size.model) for size in grid.sizes})
    names = [name for _, name in models]
    described = [
        f"{name} ({short(count)} parameters)" if len(models) == 1 or names.count(name) > 1 else name
        for count, name in models
    ]
    model = ", ".join(described)
    tokens = ", ".join(short(count) for count in sorted({size.tokens for size in grid.sizes}))
    counts = [len(cell.runs) for cell in grid.finished.cells]
    fewest, most = min(counts), max(counts)
    seeds = f"{most} seeds each" if fewest == most else f"{fewest} to {most} seeds"
    selected = sorted({run.trial.key for run in grid.results if run.trial is not None})
    # A name may contain a comma, such as "standard, centred".
    between = "; " if any("," in name for name in named) else ", "
    words = " and ".join(named) if len(named) == 2 else between.join(named)
    return [
        words[:1].upper() + words[1:] + (f" ({len(optimizers)} optimizers)" if len(optimizers) > 4 else ""),
        f"model {model}" if len(models) == 1 else f"models {model}",
        f"{tokens} training tokens",
        "one seed" if most == 1 else seeds,
        *(f"{key} selected for each optimizer" for key in selected),
    ]


def commands(plans: Sequence[StudyPlan], results: Sequence[Result], out: Path) -> list[str]:
    """The commands that reproduce this report in the folder `out`."""
    versions = sorted({result.package for result in results}, key=version_order)
    found = [result.metrics for result in results]
    extras = "eval,study" if measured(TASKS, found) or other_tasks(found) else "study"
    install = install_command(extras) + (f"  # version {versions[-1]}" if versions else "")
    # New runs go next to the old ones; a folder without a study file cannot be rerun and is used as is.
    folders = [f"{plan.folder}-again" if plan.toml else str(plan.folder) for plan in plans]
    runs = [
        shlex.join(["coupled-adam", "study", "run", str(plan.folder / STUDY_FILE), "--out", folder])
        for plan, folder in zip(plans, folders, strict=True)
        if plan.toml
    ]
    if len(plans) == len(runs) == 1:  # it ends with its report
        return [install, *runs]
    elsewhere = [] if [plan.folder for plan in plans] == [out] else ["--out", str(out)]
    return [install, *runs, shlex.join(["coupled-adam", "study", "report", *folders, *elsewhere])]


def version_order(version: str) -> tuple[list[int], bool, str]:
    """Sort key of versions: 0.9 before 0.10, and pre-releases (0.10rc1, 0.10.dev3) before their release.

    Example:
        >>> sorted(["0.10.0", "0.9.1", "0.10.0rc1"], key=version_order)
        ['0.9.1', '0.10.0rc1', '0.10.0']
    """
    match = re.match(r"(\d+(?:\.\d+)*)(.*)", version)
    if match is None:
        return [], False, version
    rest = match[2]
    return [int(number) for number in match[1].split(".")], not rest or rest.startswith(("+", ".post")), rest


def merge_unfinished(plans: Sequence[StudyPlan]) -> list[Unfinished]:
    """The runs that no folder has finished, each once, with the status of the folder that got furthest."""
    found: dict[str, Unfinished] = {}
    for run in (run for plan in plans for run in plan.unfinished):
        other = found.setdefault(run.label, run)
        found[run.label] = min(other, run, key=lambda each: FURTHEST.index(each.status))
    return list(found.values())


def facts(results: Sequence[Result]) -> dict[str, str]:
    """Versions, hardware, time and energy of the runs."""

    def each(values: Sequence[str | None]) -> str:
        return ", ".join(dict.fromkeys(value for value in values if value)) or "unknown"

    joules = [result.energy_joules for result in results if result.energy_joules is not None]
    metered = f"{len(joules)} of {counted(len(results), 'run')}"
    return {
        "coupled-adam": each([result.package for result in results]),
        "commit": each([result.commit for result in results]),
        "torch": each([result.torch for result in results]),
        "device": each([result.device for result in results]),
        "total run time": duration(sum(result.seconds for result in results)),
        **({"energy": f"{energy(sum(joules))}, measured in {metered}"} if joules else {}),
        "seeds": ", ".join(str(seed) for seed in sorted({result.seed for result in results})),
        "report written": f"{datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')}, "
        f"coupled-adam {__version__}",
    }


def _main_table(tables: Sequence[PageTable], grid: Grid) -> PageTable | None:
    """The table of the first screen if the optimizers do not fit side by side."""
    wanted = "scale" if grid.has_scale_exponents and len(grid.sizes) == 1 else "main"
    return next((table for table in tables if table.name == wanted), tables[0] if tables else None)
