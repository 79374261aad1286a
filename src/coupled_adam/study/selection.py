"""Selections of a study: which candidates are needed now, and the winner that the reported runs use.

Both are computed from the candidates' results in the study folder; there is no other state. So a selection can be
resumed after a kill, or on another machine with copied results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from coupled_adam.base.text import counted, setting
from coupled_adam.config.loading import Setting
from coupled_adam.config.study_config import Study
from coupled_adam.metrics import METRICS
from coupled_adam.study.expansion import Cell, cells_of, with_value_of
from coupled_adam.study.folder import StudyFolder
from coupled_adam.study.trials import VALIDATION_LOSS, Choice, choose


@dataclass(frozen=True)
class Selection:
    """The runs that select a setting for one model, data size and optimizer, and those that use it."""

    of: str
    """The cell of the reported runs."""
    key: str
    values: tuple[float, ...]
    """The study's own values, ascending."""
    extend: int
    candidates: Mapping[float, Cell]
    """Every run that may be tried, by value."""
    reported: tuple[Cell, ...]

    def losses(self, folder: StudyFolder, study: Study) -> dict[float, float | None]:
        """Validation loss of every finished candidate; None if its training diverged."""
        found = {value: folder.result(cell, study.evaluation) for value, cell in self.candidates.items()}
        return {value: result.metrics.get(VALIDATION_LOSS) for value, result in found.items() if result is not None}

    def choice(self, folder: StudyFolder, study: Study) -> Choice:
        """Current state of the selection."""
        return choose(self.values, self.extend, self.losses(folder, study))

    def may_extend(self, choice: Choice) -> bool:
        """Whether further values may still be tried."""
        is_over = choice.winner is not None or choice.all_diverged
        return not is_over and len(choice.tried) < len(self.values) + self.extend

    def cells(self, choice: Choice) -> list[Cell]:
        """The candidates needed so far, and the reported runs, with the winner once it is known."""
        tried = [self.candidates[value] for value in choice.tried]
        if choice.winner is None:
            return [*tried, *self.reported]
        winner = self.candidates[choice.winner]
        return [*tried, *(_decided(with_value_of(cell, winner), choice) for cell in self.reported)]


def _decided(cell: Cell, choice: Choice) -> Cell:
    assert cell.trial is not None
    return replace(cell, trial=replace(cell.trial, edge=choice.edge, trials=len(choice.tried)))


def cells_in(folder: StudyFolder, study: Study, settings: Sequence[Setting] = ()) -> list[Cell]:
    """The runs of a study that are known to be needed, given the finished runs in its folder: all of `cells_of` except
    candidates not needed yet, and reported runs with their selected setting."""
    return cells_now(cells_of(study, settings), folder, study)


def cells_now(cells: Sequence[Cell], folder: StudyFolder, study: Study) -> list[Cell]:
    """Filter runs by whether they are known to be needed, and fill in selected settings.

    Args:
        cells: all runs, from `cells_of`.
        folder: with the results of the candidates.
        study: of the runs.
    """
    found: dict[str, Cell] = {cell.label: cell for cell in cells if cell.trial is None}
    for selection in selections_of(cells, study):
        found |= {cell.label: cell for cell in selection.cells(selection.choice(folder, study))}
    return [found[cell.label] for cell in cells if cell.label in found]


def selections_of(cells: Sequence[Cell], study: Study) -> list[Selection]:
    """The selections of a study, in the order of its runs."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.trial is not None:
            groups.setdefault(cell.trial.of, []).append(cell)
    return [_selection(of, own, study) for of, own in groups.items()]


def _selection(of: str, cells: Sequence[Cell], study: Study) -> Selection:
    trials = {cell.trial.value: cell for cell in cells if cell.trial is not None and cell.trial.value is not None}
    first = cells[0].trial
    assert first is not None
    # Candidates are ordered: the study's own values, then those beyond the edges.
    count = len(trials) - 2 * study.select.extend
    return Selection(
        of=of,
        key=first.key,
        values=tuple(trials)[:count],
        extend=study.select.extend,
        candidates=trials,
        reported=tuple(cell for cell in cells if not cell.is_candidate),
    )


def with_candidates(chosen: Sequence[Cell], cells: Sequence[Cell]) -> list[Cell]:
    """Add all candidates that decide a setting of the chosen runs.

    Args:
        chosen: some of the runs.
        cells: all runs, from `cells_of`.
    """
    needed = {cell.trial.of for cell in chosen if cell.trial is not None and not cell.is_candidate}
    labels = {cell.label for cell in chosen}
    labels |= {cell.label for cell in cells if cell.trial is not None and cell.is_candidate and cell.trial.of in needed}
    return [cell for cell in cells if cell.label in labels]


def selection_lines(folder: StudyFolder, study: Study, cells: Sequence[Cell] | None = None) -> dict[str, str]:
    """Describe each decided selection in a sentence, by the cell that uses it; also selections without a winner because
    every candidate diverged.

    Args:
        folder: with the results of the candidates.
        study: of the selections.
        cells: all runs, from `cells_of`; None to compute them.
    """
    lines = {}
    for selection in selections_of(cells_of(study) if cells is None else cells, study):
        choice = selection.choice(folder, study)
        if choice.winner is not None:
            loss = selection.losses(folder, study)[choice.winner]
            assert loss is not None, "a winner has a loss"
            edge = f"; {at_edge(choice.edge)}" if choice.edge else ""
            lines[selection.of] = (
                f"{selection.of}: {selection.key} = {setting(choice.winner)}, best of "
                f"{counted(len(choice.tried), 'value')}, validation loss {METRICS[VALIDATION_LOSS].text(loss)}{edge}"
            )
        elif choice.all_diverged:
            lines[selection.of] = f"{selection.of}: {no_winner(selection.key, choice.tried)}"
    return lines


def at_edge(edge: str) -> str:
    """Message about a winner at the edge of the values tried."""
    name = "smallest" if edge == "lower" else "largest"
    return f"the {name} value tried, so a better one may lie beyond: raise select.extend or try other values"


def no_winner(key: str, tried: Sequence[float]) -> str:
    """Message about a selection without a winner."""
    values = ", ".join(setting(value) for value in tried)
    return f"training diverged with every {key} tried ({values}); try other values"
