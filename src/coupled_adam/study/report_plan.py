"""What a report has to say beside its results: what its studies planned, and which of their runs are not finished."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.study.cell import read_error
from coupled_adam.study.expansion import Cell, cells_of
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.grid import Planned
from coupled_adam.study.plan import FILE_NAME, Study, load_study, one_paragraph
from coupled_adam.study.report_data import Size
from coupled_adam.study.results import Result


@dataclass(frozen=True)
class Unfinished:
    """A run that is planned and has no result."""

    label: str
    status: str
    """running, failed, stopped or waiting."""
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
    """Why the plan is not known; empty where it is."""
    planned: tuple[Planned, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()


def read_plan(folder: Path, results: Sequence[Result]) -> StudyPlan:
    """The plan of a study folder; one that cannot be read is said in `problem` and costs nothing else.

    Args:
        folder: of the study.
        results: all finished runs of the report: a run that another folder holds is not missing.
    """
    name = next((result.study for result in results if result.folder == folder), folder.name)
    path = folder / FILE_NAME
    if not path.is_file():
        return StudyPlan(folder, name, "", "", f"{FILE_NAME} is missing in {folder}: missing runs are not known.")
    toml = path.read_text(encoding="utf-8", errors="replace")
    try:
        study = load_study(str(path))
        cells = cells_of(study)
    except ValueError as error:
        return StudyPlan(folder, name, "", toml, f"Missing runs are not known: {error}")
    finished = {(result.cell, result.seed) for result in results}
    return StudyPlan(
        folder=folder,
        title=study.title,
        description=one_paragraph(study.description),
        toml=toml,
        problem="",
        planned=tuple(_planned(cells)),
        unfinished=tuple(
            _unfinished(StudyFolder(folder), study, cell) for cell in cells if (cell.id, cell.seed) not in finished
        ),
    )


def _planned(cells: Sequence[Cell]) -> list[Planned]:
    from coupled_adam.models.config import parameter_count

    by_id: dict[str, list[Cell]] = {}
    for cell in cells:
        by_id.setdefault(cell.id, []).append(cell)
    found = []
    for id, own in by_id.items():
        config = own[0].config
        size = Size(config.training.tokens, parameter_count(config.model.to_model_config()), own[0].model)
        settings = config.optimizer.model_dump() | {"tied": config.model.tied}
        found.append(Planned(id, size, own[0].optimizer, settings, tuple(cell.seed for cell in own)))
    return found


def _unfinished(folder: StudyFolder, study: Study, cell: Cell) -> Unfinished:
    status = folder.status(cell, study.evaluation)
    # Finished, but not in results.jsonl: the report was made while the study was running.
    status = "just finished" if status == "finished" else status
    return Unfinished(cell.label, status, read_error(folder.run(cell)) if status == "failed" else "")
