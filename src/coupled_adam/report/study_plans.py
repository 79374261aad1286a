"""Plans of the studies in a report: the planned runs, the unfinished ones, and whether runs from several folders can be
compared: runs of the same name must have the same settings in all folders."""

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
"""Cell and seed: the name of a run in every folder."""


@dataclass(frozen=True)
class Unfinished:
    """A planned run without a result."""

    label: str
    status: str
    """From `StudyFolder.status`, or "just finished"."""
    reason: str
    """Why it failed."""


@dataclass(frozen=True)
class StudyPlan:
    """The plan of one study folder."""

    folder: Path
    title: str
    description: str
    toml: str
    """The text of study.toml; empty if missing."""
    problem: str
    """What is unknown about the plan or was not checked; empty without problems."""
    report: ReportSection = field(default_factory=ReportSection)
    planned: tuple[Planned, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    cells: Mapping[Name, Cell] = field(default_factory=dict)
    """Every planned run; empty if the plan is unknown."""
    is_current: bool = False
    """Whether the finished runs have the settings of study.toml as read by this version of the package. If not, the
    plan is not used to check the runs of other folders."""


def read_plans(folders: Sequence[Path], results: Sequence[Result]) -> list[StudyPlan]:
    """Read the plans of all study folders of a report.

    Args:
        folders: of the studies.
        results: all finished runs of the report.

    Raises:
        ValueError: a run has other settings than another folder plans for it, so it would differ from the runs there in
            more than the optimizer.
    """
    plans = [read_plan(folder, results) for folder in folders]
    for plan in plans:
        if plan.is_current:
            _require_its_settings(plan, results, [each.folder for each in plans if each.cells and not each.is_current])
    unchecked = _unchecked(plans)
    return [replace(plan, problem=f"{plan.problem} {unchecked.get(plan.folder, '')}".strip()) for plan in plans]


def all_planned(plans: Sequence[StudyPlan]) -> list[Planned]:
    """The cells planned by any of the studies, each once, with the seeds of all plans."""
    found: dict[str, Planned] = {}
    for each in (each for plan in plans for each in plan.planned):
        seeds = {*found.setdefault(each.cell, each).seeds, *each.seeds}
        found[each.cell] = replace(each, seeds=tuple(sorted(seeds)))
    return list(found.values())


def shared_report(plans: Sequence[StudyPlan]) -> ReportSection:
    """Merge the report settings of several studies: the lead if all agree, and all notes on the loss."""
    leads = {plan.report.lead for plan in plans}
    notes = dict.fromkeys(plan.report.loss_note for plan in plans if plan.report.loss_note)
    return ReportSection(lead=leads.pop() if len(leads) == 1 else "loss", loss_note=" ".join(notes) or None)


def read_plan(folder: Path, results: Sequence[Result]) -> StudyPlan:
    """Read the plan of a study folder; if it is unreadable, `problem` says so.

    Args:
        folder: of the study.
        results: all finished runs of the report; a run from another folder is not missing.
    """
    name = next((result.study for result in results if result.folder == folder), folder.name)
    path = folder / STUDY_FILE
    if not path.is_file():
        return StudyPlan(
            folder, name, "", "", f"{STUDY_FILE} is missing in {folder}, so its unfinished runs are not listed."
        )
    toml = ""
    try:
        toml = read_limited(path, LARGEST_TOML).decode("utf-8", errors="replace")
        study = load_study(str(path))
        cells = cells_in(StudyFolder(folder), study)
    except ValueError as error:
        return StudyPlan(folder, name, "", toml, f"The unfinished runs of {folder} are not listed: {error}")
    finished = {(result.cell, result.seed) for result in results}
    # Runs whose setting is not selected yet cannot be compared with others.
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
    """Raise if runs have other settings than `plan` has under the same name.

    Args:
        plan: of one folder; must be current.
        results: all finished runs of the report.
        outdated: folders whose own plans are not current.
    """
    wrong = []
    for result in results:
        cell = plan.cells.get((result.cell, result.seed))
        if cell is not None and result.folder not in outdated and not _has_settings_of(result, cell):
            wrong.append(f"{cell.label} in {result.folder}: {_differing(result, cell)}")
    if wrong:
        raise UserError(
            f"these runs have other settings than {plan.folder / STUDY_FILE} plans for them, so they cannot be "
            "compared with the runs there; report the folders one by one, or run them with the same settings:\n"
            + "\n".join(wrong)
        )


def _has_settings_of(result: Result, cell: Cell) -> bool:
    """Whether a run has the settings of a cell. A result from before a setting was added has another hash for the same
    settings, so its config is compared too."""
    if result.config_hash == cell.config_hash:
        return True
    config = _config_of(result)
    return config is not None and not settings_that_differ(config, cell.config)


def _config_of(result: Result) -> Config | None:
    """The config in the run folder; None if missing or unreadable."""
    try:
        return load_config(str(result.run_folder / CONFIG_FILE))
    except ValueError:
        return None


def _differing(result: Result, cell: Cell) -> str:
    """The settings in which a run and a cell differ, or their hashes if the run has no config."""
    config = _config_of(result)
    if config is None:
        return f"settings {result.config_hash} instead of {cell.config_hash}"
    return ", ".join(settings_that_differ(config, cell.config))


def _unchecked(plans: Sequence[StudyPlan]) -> dict[Path, str]:
    """Notes on folders that share no run with the others, planned or finished, so that their settings and text cannot
    be compared."""
    apart = {plan.folder: _known_settings(plan) for plan in plans}
    seen = apart.pop(plans[0].folder)
    while joined := [folder for folder, own in apart.items() if own & seen]:
        seen = seen.union(*(apart.pop(folder) for folder in joined))
    return {
        folder: f"The settings and text of the runs in {folder} were not checked against those of the others."
        for folder in apart
    }


def _known_settings(plan: StudyPlan) -> set[tuple[Name, str]]:
    """Runs with the hash of their settings: all planned ones, or the finished ones if the plan is not current."""
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
    # Finished but not in results.jsonl yet: the study is still running.
    status = "just finished" if status == "finished" else status
    return Unfinished(cell.label, status, read_error(folder.run(cell)) if status == "failed" else "")
