"""Which cells the ablations compare: Coupled Adam over its scale exponent n, and SGD over its factor f."""

from collections.abc import Sequence

from coupled_adam.base.text import setting
from coupled_adam.report.grid import CellRuns, sizes_of
from coupled_adam.report.result_notes import loss_name
from coupled_adam.report.significance import summarise


def scale_groups(cells: Sequence[CellRuns]) -> list[list[CellRuns]]:
    """Coupled Adam with its scaled forms, for the sizes where n is varied."""
    families = [
        [cell for cell in cells if cell.size == size and cell.variant.role in ("coupled", "scaled")]
        for size in sizes_of(cells)
    ]
    return [family for family in families if len({cell.variant.n for cell in family}) > 1]


def sgd_groups(cells: Sequence[CellRuns]) -> tuple[list[list[CellRuns]], list[list[CellRuns]], list[str]]:
    """Group the cells of the sizes with SGD. As in the paper, the best f has the smallest mean test loss.

    Returns:
        All SGD cells with standard and coupled; the best SGD cell with coupled; and notes on how f was chosen.
    """
    searched, best, choices = [], [], []
    for size in sizes_of(cells):
        sgd = [cell for cell in cells if cell.size == size and cell.variant.role == "sgd"]
        adam = [cell for cell in cells if cell.size == size and cell.variant.role in ("standard", "coupled")]
        if not sgd:
            continue
        searched.append([*sgd, *adam])
        chosen = best_factor(sgd)
        if chosen is None:
            choices.append(f"{size.label}: no SGD run has a loss, so no f is chosen.")
            continue
        best.append([chosen, *(cell for cell in adam if cell.variant.role == "coupled")])
        choices.append(choice_note(chosen, sgd))
    return searched, best, choices


def choice_note(chosen: CellRuns, sgd: Sequence[CellRuns]) -> str:
    """Describe the choice of f, and whether a better f may lie beyond the values tried or among unfinished ones."""
    loss = loss_name(run for cell in sgd for run in cell.runs.values())
    tried = sorted({cell.variant.f for cell in sgd if mean_loss(cell) is not None})
    untried = sorted({cell.variant.f for cell in sgd} - set(tried))
    note = f"{chosen.size.label}: f = {setting(chosen.variant.f)} has the smallest mean {loss} of f = {listed(tried)}"
    if len(tried) == 1:
        note = f"{chosen.size.label}: f = {setting(chosen.variant.f)} is the only one with a {loss}"
    elif chosen.variant.f in (tried[0], tried[-1]):
        note += "; it is at the edge of these values, so a better one may lie beyond"
    if untried:
        note += f"; no {loss} yet for f = {listed(untried)}"
    return f"{note}."


def listed(numbers: Sequence[float]) -> str:
    """Numbers separated by commas."""
    return ", ".join(map(setting, numbers))


def mean_loss(cell: CellRuns) -> float | None:
    """Mean test loss over the seeds."""
    return summarise(cell.values("loss").values()).mean


def best_factor(sgd: Sequence[CellRuns]) -> CellRuns | None:
    """The cell with the smallest mean test loss; None if no run has one."""
    means = [(mean_loss(cell), cell) for cell in sgd]
    found = [(mean, cell) for mean, cell in means if mean is not None]
    return min(found, key=lambda pair: pair[0])[1] if found else None
