"""The theory of a study's runs as a table: means over the seeds, and the paper's values below.

Each number of a run is already a mean over its checkpoints. There is no better or worse here, so nothing is tested.
"""

from dataclasses import dataclass

from coupled_adam.base.notation import MISSING
from coupled_adam.base.text import short
from coupled_adam.metrics import THEORY_PREFIX
from coupled_adam.report.grid import CellRuns, Grid, model_labels, optimizer_labels
from coupled_adam.report.significance import Summary, is_number, summarise
from coupled_adam.report.table_model import ReportTable, TableCell, mean_cell, mean_column, text_column
from coupled_adam.theory.record import PUBLISHED, Spread
from coupled_adam.theory.theory_numbers import spread


@dataclass(frozen=True)
class TheoryColumn:
    """One number of the theory."""

    name: str
    """Key in the results, without `theory_`."""
    label: str
    latex: str
    exponent_below: float = 1e-3
    """Smaller numbers are written with an exponent."""

    @property
    def key(self) -> str:
        """Key in the results."""
        return f"{THEORY_PREFIX}{self.name}"


COLUMNS = (
    TheoryColumn("second_moment_r2", "E[v]: R²", r"$\mathrm{E}[v]$: $R^2$"),
    TheoryColumn("second_moment_mutual_information", "E[v]: I", r"$\mathrm{E}[v]$: $I$"),
    TheoryColumn("second_moment_A", "E[v]: A", r"$\mathrm{E}[v]$: $A$", exponent_below=0.1),
    TheoryColumn("x_true_r2", "X(i=t): R²", "$X^{(i=t)}$: $R^2$"),
    TheoryColumn("x_true_mutual_information", "X(i=t): I", "$X^{(i=t)}$: $I$"),
    TheoryColumn("x_false_r2", "X(i≠t): R²", r"$X^{(i\neq t)}$: $R^2$"),
    TheoryColumn("x_false_mutual_information", "X(i≠t): I", r"$X^{(i\neq t)}$: $I$"),
    TheoryColumn("gradient_sum", "Σg, output", r"$\Sigma g$, output"),
    TheoryColumn("updates_sgd", "Σu, SGD", r"$\Sigma u$, SGD"),
    TheoryColumn("updates_adam", "Σu, Adam", r"$\Sigma u$, Adam"),
    TheoryColumn("updates_coupled", "Σu, Coupled", r"$\Sigma u$, Coupled"),
    TheoryColumn("updates_own", "Σu, own", r"$\Sigma u$, own"),
    TheoryColumn("updates_coupled_output", "Σu, Coupled: output", r"$\Sigma u$, Coupled: output"),
    TheoryColumn("updates_coupled_input", "Σu, Coupled: input", r"$\Sigma u$, Coupled: input"),
)
HEAD = (
    text_column("D", "D", "$D$"),
    text_column("N", "N", "$N$"),
    text_column("optimizer", "optimizer"),
    text_column("seeds", "seeds"),
    text_column("checkpoints", "checkpoints"),
)
PAPER = ("20B", "125M to 760M", "the paper", MISSING, "10 each")
NOTES = (
    "Mean over the checkpoints of a run, then over the seeds, with the standard deviation over the seeds in "
    "parentheses. The paper's values cover all checkpoints of three models.",
    "R^2 (uncentred) of fits y = A p through the origin, where p is the unigram probability; I: mutual information in "
    "nats.",
    "Sums over the vocabulary are divided by the sum of the lengths: 0 does not move the mean embedding, 1 moves all "
    "rows alike. For the output layer's gradients, the largest sum of any batch is shown. Each update is one step from "
    "the same state; own: the optimizer that trained the run.",
)


def theory_table(grid: Grid) -> ReportTable | None:
    """One row per cell with the theory, and the paper's row; None if no run has it."""
    models = model_labels(grid.cells)
    named = [(cell, name) for cell, name in zip(grid.cells, optimizer_labels(grid.cells), strict=True) if _counts(cell)]
    if not named:
        return None
    shown = [column for column in COLUMNS if any(summarise(_values(cell, column)).count for cell, _ in named)]
    rows = [
        (
            *map(TableCell, (short(cell.size.tokens), models[cell.size], name, _seeds(cell), _checkpoints(cell))),
            *(_cell(summarise(_values(cell, column)), column) for column in shown),
        )
        for cell, name in named
    ]
    rows.append((*map(TableCell, PAPER), *map(_published, shown)))
    columns = [mean_column(each.key, each.label, each.latex) for each in shown]
    return ReportTable("theory", "The theory, measured", (*HEAD, *columns), tuple(rows), NOTES, groups=2)


def _values(cell: CellRuns, column: TheoryColumn) -> list[float | None]:
    return list(cell.values(column.key).values())


def _counts(cell: CellRuns) -> list[int]:
    """Number of checkpoints of every run that has the theory."""
    return [int(value) for value in cell.values(f"{THEORY_PREFIX}checkpoints").values() if is_number(value)]


def _seeds(cell: CellRuns) -> str:
    """Number of seeds with the theory, and if some are missing, of expected ones."""
    there, wanted = len(_counts(cell)), len(cell.seeds)
    return str(there) if there == wanted else f"{there} of {wanted}"


def _checkpoints(cell: CellRuns) -> str:
    """Number of checkpoints per run; several numbers if runs differ."""
    return " or ".join(map(str, sorted(set(_counts(cell)))))


def _cell(summary: Summary, column: TheoryColumn) -> TableCell:
    return mean_cell(summary, lambda mean, std: spread(Spread(mean, std), column.exponent_below))


def _published(column: TheoryColumn) -> TableCell:
    found = PUBLISHED.get(column.name)
    if found is None:
        return TableCell(MISSING)
    return TableCell(spread(found, column.exponent_below), {"mean": found.mean, "std": found.std})
