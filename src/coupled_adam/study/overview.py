"""Studies as tables on a terminal: the plan with what it takes, the list of those that ship, how the runs stand.

The time is counted from the configs (training/estimates); nothing here loads torch.
"""

from collections.abc import Sequence

from rich.table import Column, Table
from rich.text import Text

from coupled_adam.base.text import short
from coupled_adam.config.builtin_files import STUDIES
from coupled_adam.config.study_config import Study, load_study
from coupled_adam.metrics import METRICS
from coupled_adam.models.model_config import parameter_count
from coupled_adam.study.cell import read_error
from coupled_adam.study.expansion import Cell, cells_of, exact_amount
from coupled_adam.study.folder import StudyFolder, last_row
from coupled_adam.study.results import Result
from coupled_adam.training.estimates import H200, UTILISATION, seconds

HOUR = 3600.0
GPU_HOURS_WORTH_SAYING = 1.0


def gpu_hours(cells: Sequence[Cell]) -> float:
    """The time of the runs' steps on one H100 or H200, without evaluation."""
    return sum(seconds(cell.config, H200) for cell in cells) / HOUR


def hours(amount: float) -> str:
    """GPU hours as a table shows them.

    Example:
        >>> hours(1234.5), hours(2.74), hours(0.002)
        ('1,234', '2.7', '< 0.1')
    """
    return f"{amount:,.0f}" if amount >= 99.5 else f"{amount:.1f}" if amount >= 0.05 else "< 0.1"


def plan_table(study: Study, cells: Sequence[Cell], folder: StudyFolder) -> Table:
    """The cells of a study, what each takes, and how many of its runs are finished."""
    table = Table(
        Column("cell", no_wrap=True),
        title=f"{study.name}: {len(cells)} runs",
        caption=f"N parameters, D tokens. GPU hours: of all seeds, on H100 or H200 at {UTILISATION:.0%} of their bf16 "
        "peak, without evaluation; an estimate.",
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
            id,
            ",".join(str(cell.seed) for cell in runs),
            str(sum(folder.result(cell, study.evaluation) is not None for cell in runs)),
            short(parameter_count(config.to_model_config())),
            exact_amount(config.training.tokens),
            short(config.total_steps),
            hours(gpu_hours(runs)),
        )
    return table


def shipped_table() -> Table:
    """The studies that come with the package, and their size."""
    table = Table(
        Column("study", no_wrap=True), "what", title="Studies", caption="GPU hours: on H100 or H200, estimated."
    )
    for heading in ("runs", "tokens", "GPU hours"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in STUDIES:
        study = load_study(name)
        cells = cells_of(study)
        tokens = short(sum(cell.config.training.tokens for cell in cells))
        table.add_row(name, study.title, str(len(cells)), tokens, hours(gpu_hours(cells)))
    return table


def status_table(study: Study, cells: Sequence[Cell], folder: StudyFolder) -> Table:
    """How each run stands; why it failed, where one did."""
    table = Table(Column("run", no_wrap=True), "status", title=f"{study.name} in {folder.path}")
    for heading in ("step", METRICS["train_loss"].label, METRICS["loss"].label):
        table.add_column(heading, justify="right")
    reasons = {cell.label: read_error(folder.run(cell)) for cell in cells}
    failed = [cell for cell in cells if folder.status(cell, study.evaluation) == "failed"]
    if failed:
        table.add_column("why it failed")
    for cell in cells:
        row = last_row(folder.run(cell))
        step = "" if row is None else f"{row['step']}/{cell.config.total_steps}"
        losses = _losses(folder.result(cell, study.evaluation), row)
        reason = [Text(reasons[cell.label] if cell in failed else "")] if failed else []
        table.add_row(cell.label, folder.status(cell, study.evaluation), step, *losses, *reason)
    return table


def _losses(result: Result | None, row: dict[str, float] | None) -> tuple[str, str]:
    """The training loss as it was logged last, and the test loss of a finished run, as text."""
    logged = (row or {}).get("loss")
    tested = None if result is None else result.metrics.get("loss")
    split = "" if result is None or result.loss_split == "test" else f" ({result.loss_split})"
    return "" if logged is None else f"{logged:.4f}", "" if tested is None else f"{tested:.4f}{split}"


def counts(study: Study, cells: Sequence[Cell], folder: StudyFolder) -> dict[str, int]:
    """How many runs stand how, by the words of `StudyFolder.status`."""
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
