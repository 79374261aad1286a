"""Terminal tables about studies: the plan with its cost, the built-in studies, the status of the runs.

The cost is estimated from the configs (training/estimates); nothing here loads torch.
"""

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from coupled_adam.base.progress import LongName
from coupled_adam.base.text import counted, fixed, percent, short
from coupled_adam.config.builtin_files import STUDIES
from coupled_adam.config.study_config import Study, load_study
from coupled_adam.metrics import METRICS
from coupled_adam.models.model_config import parameter_count
from coupled_adam.study.cell import read_error
from coupled_adam.study.expansion import Cell, cells_of, exact_amount
from coupled_adam.study.folder import StudyFolder, last_row
from coupled_adam.study.results import Result
from coupled_adam.study.selection import selections_of
from coupled_adam.study.trials import VALIDATION_LOSS
from coupled_adam.training.estimates import H200, UTILISATION, seconds

HOUR = 3600.0
GPU_HOURS_WORTH_SAYING = 1.0


def gpu_hours(cells: Sequence[Cell]) -> float:
    """Training time of the runs on one H100 or H200, without evaluation."""
    return sum(seconds(cell.config, H200) for cell in cells) / HOUR


def hours(amount: float) -> str:
    """GPU hours as a table shows them.

    Example:
        >>> hours(1234.5), hours(2.74), hours(0.002)
        ('1,234', '2.7', '< 0.1')
    """
    return f"{round(amount):,}" if amount >= 99.5 else fixed(amount, 1) if amount >= 0.05 else "< 0.1"


def plan_table(study: Study, cells: Sequence[Cell], folder: StudyFolder) -> Table:
    """Make a table of the cells of a study, with their cost and their number of finished runs."""
    table = Table(
        "cell",  # gives way on a narrow terminal, so that no number is cut
        title=f"{study.name}: {counted(len(cells), 'run')}",
        caption=f"N: parameters. D: tokens. GPU hours: estimate for all seeds on H100 or H200 at "
        f"{percent(UTILISATION)} of the bf16 peak, without evaluation.",
        show_footer=True,
    )
    by_id = _by_id(cells)
    done = sum(folder.result(cell, study.evaluation) is not None for cell in cells)
    for heading, footer in (
        ("seeds", str(len(cells))),
        ("done", str(done)),
        ("N", ""),
        ("D", short(sum(cell.config.training.tokens for cell in cells))),
        ("steps", short(sum(cell.config.total_steps for cell in cells))),
        ("GPU hours", hours(gpu_hours(cells))),
    ):
        table.add_column(heading, footer=footer, justify="right", no_wrap=True)
    table.columns[0].footer = "all runs"
    for id, runs in by_id.items():
        config = runs[0].config
        table.add_row(
            LongName(id),
            ",".join(str(cell.seed) for cell in runs),
            str(sum(folder.result(cell, study.evaluation) is not None for cell in runs)),
            short(parameter_count(config.to_model_config())),
            exact_amount(config.training.tokens),
            short(config.total_steps),
            hours(gpu_hours(runs)),
        )
    return table


def worst_case(study: Study, cells: Sequence[Cell], all_cells: Sequence[Cell]) -> list[str]:
    """Describe the largest possible number of runs, if selections can be extended; empty without selections.

    Args:
        study: the planned study.
        cells: the runs known to be needed.
        all_cells: of the study, from `cells_of`.
    """
    added: list[Cell] = []
    open_ones = {cell.trial.of for cell in cells if cell.trial is not None and cell.is_open}
    known = {cell.label for cell in cells}
    for selection in selections_of(all_cells, study):
        used = sum(cell.label in known for cell in selection.candidates.values()) - len(selection.values)
        unused = [cell for cell in selection.candidates.values() if cell.label not in known]
        if selection.of in open_ones:
            added += unused[: max(0, selection.extend - max(0, used))]
    selected = sorted({cell.trial.key for cell in cells if cell.trial is not None})
    if not selected:
        return []
    candidates = sum(cell.is_candidate for cell in cells)
    lines = [
        f"{candidates} of these runs are candidates (seed {study.select.trial_seed}) that select {', '.join(selected)} "
        "by validation loss; the others use the winner."
    ]
    if added:
        total = [*cells, *added]
        more = counted(study.select.extend, "more value is", "more values are")
        lines.append(
            f"At most {counted(len(total), 'run')}, {hours(gpu_hours(total))} GPU hours: if a winner is the smallest "
            f"or largest value, up to {more} tried beyond it."
        )
    return lines


def shipped_table() -> Table:
    """Make a table of the built-in studies and their cost."""
    table = Table(
        Column("study", no_wrap=True), "what", title="Studies", caption="GPU hours: estimate for H100 or H200."
    )
    for heading in ("runs", "tokens", "GPU hours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in STUDIES:
        study = load_study(name)
        cells = _without_extension(study, cells_of(study))
        tokens = short(sum(cell.config.training.tokens for cell in cells))
        table.add_row(name, study.title, str(len(cells)), tokens, hours(gpu_hours(cells)))
    return table


def _without_extension(study: Study, cells: Sequence[Cell]) -> list[Cell]:
    """The runs of a study without candidates beyond the edges of a search."""
    beyond = {
        cell.label
        for selection in selections_of(cells, study)
        for value, cell in selection.candidates.items()
        if value not in selection.values
    }
    return [cell for cell in cells if cell.label not in beyond]


def status_table(study: Study, cells: Sequence[Cell], folder: StudyFolder) -> Table:
    """Make a table of the status of each run, with the reasons of failures."""
    table = Table(
        # The name and the reason give way on a narrow terminal, so that no number is cut.
        "run",
        Column("status", no_wrap=True),
        Column("step", justify="right", no_wrap=True),
        title=f"{study.name} in {folder.path}",
    )
    for heading in (METRICS["train_loss"].label, METRICS["loss"].label):
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    reasons = {cell.label: read_error(folder.run(cell)) for cell in cells}
    failed = [cell for cell in cells if folder.status(cell, study.evaluation) == "failed"]
    if failed:
        table.add_column("why it failed", overflow="fold")
    for cell in cells:
        row = last_row(folder.run(cell))
        step = "" if row is None else f"{row['step']:,}/{cell.config.total_steps:,}"
        losses = _losses(folder.result(cell, study.evaluation), row)
        reason = [Text(reasons[cell.label] if cell in failed else "")] if failed else []
        table.add_row(LongName(cell.label), folder.status(cell, study.evaluation), step, *losses, *reason)
    return table


def _losses(result: Result | None, row: dict[str, float] | None) -> tuple[str, str]:
    """The last logged training loss, and the test loss of a finished run, as text."""
    logged = (row or {}).get("loss")
    trained = "" if logged is None else METRICS["train_loss"].text(logged)
    if result is not None and result.is_candidate:
        loss, split = result.metrics.get(VALIDATION_LOSS), " (val)"
        return trained, "diverged" if loss is None else METRICS[VALIDATION_LOSS].text(loss) + split
    tested = None if result is None else result.metrics.get("loss")
    split = "" if result is None or result.loss_split == "test" else f" ({result.loss_split})"
    return trained, "" if tested is None else METRICS["loss"].text(tested) + split


def counts(study: Study, cells: Sequence[Cell], folder: StudyFolder) -> dict[str, int]:
    """Number of runs by `StudyFolder.status`."""
    found: dict[str, int] = {}
    for cell in cells:
        status = folder.status(cell, study.evaluation)
        found[status] = found.get(status, 0) + 1
    return found


def _by_id(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.id, []).append(cell)
    return found
