"""What `coupled-adam study` prints: the plan of a dry run, the comparison of a report, and the outcome of the runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from coupled_adam.base.progress import print_fitted, with_whole_names
from coupled_adam.base.text import counted, printable_lines

if TYPE_CHECKING:
    from coupled_adam.config.study_config import Study
    from coupled_adam.report.contents import Contents
    from coupled_adam.study.expansion import Cell
    from coupled_adam.study.runner import StudyOutcome


def print_plan(
    console: Console, study: "Study", cells: "Sequence[Cell]", all_cells: "Sequence[Cell]", folder: Any
) -> None:
    """Print the planned runs and the largest number there can be.

    Args:
        all_cells: all cells of the study, including candidates that may be added beyond the edges of a search.
    """
    from coupled_adam.config.study_config import one_paragraph
    from coupled_adam.study.folder import TO_BE_MEASURED
    from coupled_adam.study.overview import counts, plan_table, worst_case

    console.print(Text(study.title, style="bold"))
    if study.description:
        console.print(Text(one_paragraph(study.description)))
    table = plan_table(study, cells, folder)
    with_whole_names(console, table).print(table)
    for line in worst_case(study, cells, all_cells):
        console.print(Text(line))
    trained = counts(study, cells, folder).get(TO_BE_MEASURED)
    if trained:
        console.print(Text(counted(trained, "run is", "runs are") + " trained and still to be measured."))
    console.print(Text("Dry run: nothing was started."))


def print_comparison(console: Console, contents: "Contents") -> None:
    """Print the first table of a report, the notes on selections, and the verdict."""
    from coupled_adam.report.table_formats import for_console, to_rich_comparison

    for table in contents.tables[:1]:
        notes = tuple(note for note in table.notes if note != contents.section.loss_note)  # part of the verdict
        table = for_console(replace(table, notes=notes), console)
        shown = to_rich_comparison(table)
        print_fitted(console, shown)
        for note in table.notes:
            console.print(Text(note, style="dim"))
    for table in contents.tables:
        if table.name == "selection":
            for note in table.notes[1:]:  # winners at an edge, shorter candidates
                console.print(Text(note, style="bold"), soft_wrap=True)
    for plan in contents.plans:
        if plan.problem:
            console.print(Text(printable_lines(plan.problem), style="dim"))
    console.print(Text(contents.verdict.text))


def print_outcome(console: Console, outcome: "StudyOutcome", again: str) -> None:
    """Print which runs are not finished and why, and exit unless all are.

    Args:
        again: the command that resumes the study.
    """
    from coupled_adam.training.interruption import exit_code

    def say(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    for label, reason in outcome.failed.items():
        say(f"Failed: {label}: {reason}")
    for label, reason in outcome.busy.items():
        say(f"Running in another process: {label}: {reason}")
    for label, reason in outcome.waiting.items():
        say(f"Not started: {label}: {reason}")
    if outcome.signal is not None:
        state = "jobs keep running; collect their results" if outcome.runs_go_on else "progress saved; resume"
        left = counted(outcome.left, "run is", "runs are")
        say(f"{outcome.signal}: {left} not finished ({state} with the same command): {again}")
        raise typer.Exit(exit_code(outcome.signal))
    if outcome.failed:
        failed, them = counted(len(outcome.failed), "run"), "it" if len(outcome.failed) == 1 else "them"
        say(f"{failed} failed; fix the cause and retry {them} with the same command: {again}")
    if outcome.failed or (outcome.waiting and not outcome.busy):
        raise typer.Exit(1)
