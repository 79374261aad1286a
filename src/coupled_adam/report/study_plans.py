"""What a report has to say beside its results: what its studies planned, which of their runs are not finished, and
whether runs of several folders can be compared: under one name, all must have planned or done the same."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coupled_adam.base.errors import UserError
from coupled_adam.base.files import LARGEST_TOML, read_limited
from coupled_adam.config.builtin_files import CONFIG_FILE, STUDY_FILE
from coupled_adam.config.run_config import Config, load_config
from coupled_adam.config.study_config import Study, load_study, one_paragraph
from coupled_adam.config.study_sections import ReportSection
from coupled_adam.report.grid import Planned, Size, variant_of
from coupled_adam.study.cell import read_error
from coupled_adam.study.config_hash import settings_that_differ
from coupled_adam.study.expansion import Cell
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.results import Result, read_results
from coupled_adam.study.selection import cells_in

Name = tuple[str, int]
"""Cell and seed: what a run is called in every folder."""


@dataclass(frozen=True)
class Unfinished:
    """A run that is planned and has no result."""

    label: str
    status: str
    """As `StudyFolder.status` says; or just finished."""
    reason: str
    """Why it failed."""


@dataclass(frozen=True)
class StudyPlan:
    """What one study folder wants."""

    folder: Path
    title: str
    description: str
    toml: str
    """The text of study.toml; empty where there is none."""
    problem: str
    """What is not known of the plan, or was not checked; empty where there is no such thing."""
    report: ReportSection = field(default_factory=ReportSection)
    planned: tuple[Planned, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    cells: Mapping[Name, Cell] = field(default_factory=dict)
    """Every run that is planned; empty where the plan is not known."""
    is_current: bool = False
    """Whether its finished runs have the settings of study.toml as it is read today. They need not when another version
    of the package made them; then the plan says nothing about the runs of others."""


def read_plans(folders: Sequence[Path], results: Sequence[Result]) -> list[StudyPlan]:
    """The plans of all study folders of a report.

    Args:
        folders: of the studies.
        results: all finished runs of the report.

    Raises:
        ValueError: where a run has other settings than another folder plans for it: set against runs of that folder, it
            would differ in more than the optimizer.
    """
    plans = [read_plan(folder, results) for folder in folders]
    for plan in plans:
        if plan.is_current:
            _require_its_settings(plan, results, [each.folder for each in plans if each.cells and not each.is_current])
    unchecked = _unchecked(plans)
    return [replace(plan, problem=f"{plan.problem} {unchecked.get(plan.folder, '')}".strip()) for plan in plans]


def all_planned(plans: Sequence[StudyPlan]) -> list[Planned]:
    """The cells that any of the studies plans, each once, with the seeds that all of them plan for it."""
    found: dict[str, Planned] = {}
    for each in (each for plan in plans for each in plan.planned):
        seeds = {*found.setdefault(each.cell, each).seeds, *each.seeds}
        found[each.cell] = replace(each, seeds=tuple(sorted(seeds)))
    return list(found.values())


def shared_report(plans: Sequence[StudyPlan]) -> ReportSection:
    """How the report of several studies is arranged: as they say where all say the same, with all that they say of the
    loss."""
    leads = {plan.report.lead for plan in plans}
    notes = dict.fromkeys(plan.report.loss_note for plan in plans if plan.report.loss_note)
    return ReportSection(lead=leads.pop() if len(leads) == 1 else "loss", loss_note=" ".join(notes) or None)


def read_plan(folder: Path, results: Sequence[Result]) -> StudyPlan:
    """The plan of a study folder; one that cannot be read is said in `problem` and costs nothing else.

    Args:
        folder: of the study.
        results: all finished runs of the report: a run that another folder holds is not missing.
    """
    name = next((result.study for result in results if result.folder == folder), folder.name)
    path = folder / STUDY_FILE
    if not path.is_file():
        return StudyPlan(folder, name, "", "", f"{STUDY_FILE} is missing in {folder}: missing runs are not known.")
    toml = ""
    try:
        toml = read_limited(path, LARGEST_TOML).decode("utf-8", errors="replace")
        study = load_study(str(path))
        cells = cells_in(StudyFolder(folder), study)
    except ValueError as error:
        return StudyPlan(folder, name, "", toml, f"Missing runs are not known: {error}")
    finished = {(result.cell, result.seed) for result in results}
    # A run whose setting is not selected yet says nothing about the settings of others.
    by_name = {(cell.id, cell.seed): cell for cell in cells if not cell.is_open}
    return StudyPlan(
        folder=folder,
        title=study.title,
        description=one_paragraph(study.description),
        toml=toml,
        problem="",
        report=study.report,
        planned=tuple(_planned([cell for cell in cells if not cell.is_candidate])),
        unfinished=tuple(
            _unfinished(StudyFolder(folder), study, cell) for cell in cells if (cell.id, cell.seed) not in finished
        ),
        cells=by_name,
        is_current=all(
            _has_settings_of(result, by_name[result.cell, result.seed])
            for result in read_results(folder)
            if (result.cell, result.seed) in by_name
        ),
    )


def _require_its_settings(plan: StudyPlan, results: Sequence[Result], outdated: Sequence[Path]) -> None:
    """Refuse runs that have other settings than `plan` has under the same name.

    Args:
        plan: of one folder, and true of its own runs.
        results: all finished runs of the report.
        outdated: folders whose own plans do not know the settings of their runs either.
    """
    wrong = []
    for result in results:
        cell = plan.cells.get((result.cell, result.seed))
        if cell is not None and result.folder not in outdated and not _has_settings_of(result, cell):
            wrong.append(f"{cell.label} in {result.folder}: {_differing(result, cell)}")
    if wrong:
        raise UserError(
            f"these runs have other settings than {plan.folder / STUDY_FILE} has for them, so they cannot be compared "
            "with the runs there; report the folders one by one, or run them with the same settings:\n"
            + "\n".join(wrong)
        )


def _has_settings_of(result: Result, cell: Cell) -> bool:
    """Whether a run was done as the cell says. A result from before a setting was added has another hash for the same
    settings; its config, read today, has not."""
    if result.config_hash == cell.config_hash:
        return True
    config = _config_of(result)
    return config is not None and not settings_that_differ(config, cell.config)


def _config_of(result: Result) -> Config | None:
    """The config in the run folder; None where it is not there or cannot be read."""
    try:
        return load_config(str(result.run_folder / CONFIG_FILE))
    except ValueError:
        return None


def _differing(result: Result, cell: Cell) -> str:
    """In which settings a run and a cell differ, as far as the run folder tells."""
    config = _config_of(result)
    if config is None:
        return f"settings {result.config_hash} instead of {cell.config_hash}"
    return ", ".join(settings_that_differ(config, cell.config))


def _unchecked(plans: Sequence[StudyPlan]) -> dict[Path, str]:
    """What to say of folders that have no run in common with the others, planned or finished, by which to see that
    settings and text are the same."""
    apart = {plan.folder: _known_settings(plan) for plan in plans}
    seen = apart.pop(plans[0].folder)
    while joined := [folder for folder, own in apart.items() if own & seen]:
        seen = seen.union(*(apart.pop(folder) for folder in joined))
    return {
        folder: f"That the runs of {folder} have the settings and the text of the others is not checked."
        for folder in apart
    }


def _known_settings(plan: StudyPlan) -> set[tuple[Name, str]]:
    """Runs with the hash of their settings: all that are planned, or where the plan does not tell the finished ones."""
    if plan.is_current:
        return {(name, cell.config_hash) for name, cell in plan.cells.items()}
    return {((result.cell, result.seed), result.config_hash) for result in read_results(plan.folder)}


def _planned(cells: Sequence[Cell]) -> list[Planned]:
    by_id: dict[str, list[Cell]] = {}
    for cell in cells:
        by_id.setdefault(cell.id, []).append(cell)
    found = []
    for id, own in by_id.items():
        first = own[0]
        size = Size(first.config.training.tokens, first.parameters, first.model)
        found.append(Planned(id, size, variant_of(first.optimizer, first.settings), tuple(cell.seed for cell in own)))
    return found


def _unfinished(folder: StudyFolder, study: Study, cell: Cell) -> Unfinished:
    status = folder.status(cell, study.evaluation)
    # Finished, but not in results.jsonl: the report was made while the study was running.
    status = "just finished" if status == "finished" else status
    return Unfinished(cell.label, status, read_error(folder.run(cell)) if status == "failed" else "")
