"""The measures of all tables side by side, as text for the terminal and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.text import four_digits, printable, significant
from coupled_adam.inspection.model_inspection import UNDEFINED, MeasuredModel, MeasuredTable
from coupled_adam.inspection.plain_sentence import sentence
from coupled_adam.metrics import METRICS, Metric

DASH = "—"
MARKS = "¹²³⁴⁵⁶⁷⁸⁹"
SHOWN = (
    *("iso", "iso_both_signs", "mu_norm", "mean_norm", "mu_norm_ratio", "mean_cosine", "iso_score", "kappa"),
    *("rho_log", "rho", "r_cos", "r_cos_5", "spearman"),
)
TABLE_ERROR = "rounding error relative to the distance of embeddings from their mean"
LOGIT_ERROR = "the same for logits, with random unit vectors"
RECENTRED = "as it is → recentred"


@dataclass(frozen=True)
class InspectionColumn:
    """One table of one model."""

    model: str
    role: str
    tensor: str
    sentence: str

    @property
    def heading(self) -> str:
        """Model, role and tensor in one line."""
        return f"{self.model}, {self.role} table {self.tensor}"


@dataclass(frozen=True)
class InspectionRow:
    """One measure of every table."""

    label: str
    better: str
    meaning: str
    cells: Sequence[str]


@dataclass(frozen=True)
class Overview:
    """The whole table, and the notes its marks refer to."""

    columns: Sequence[InspectionColumn]
    rows: Sequence[InspectionRow]
    notes: Sequence[str]
    is_quantised: bool
    """Whether there are rows with quantisation errors."""


def compare(models: Sequence[MeasuredModel]) -> Overview:
    """Arrange the tables of all models side by side."""
    labels = short_names([printable(model.path) for model in models])
    pairs = [(label, table) for label, model in zip(labels, models, strict=True) for table in model.tables]
    tables = [table for _, table in pairs]
    columns = [
        InspectionColumn(label, table.role, printable(table.name), sentence(table.metrics)) for label, table in pairs
    ]
    notes: list[str] = []
    rows = [
        InspectionRow("rows x columns", "", "vocabulary and width of the model", [_shape(table) for table in tables])
    ]
    for metric in (METRICS[key] for key in SHOWN):
        cells = [_cell(metric, table, notes) for table in tables]
        rows.append(InspectionRow(metric.label, metric.arrow, metric.meaning, cells))
    quantised = _quantisation_rows(tables)
    rows += _benchmark_rows(tables) + _zero_rows(tables) + quantised
    return Overview(columns, rows, [f"{MARKS[number]} {note}" for number, note in enumerate(notes)], bool(quantised))


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    Example:
        >>> short_names(["runs/adam/export", "runs/coupled/export", "gpt2.npy"])
        ['adam/export', 'coupled/export', 'gpt2.npy']
    """
    parts = [Path(path).parts for path in paths]
    lengths = [1] * len(paths)
    for number, own in enumerate(parts):
        while lengths[number] < len(own) and any(
            own != other and own[-lengths[number] :] == other[-lengths[number] :] for other in parts
        ):
            lengths[number] += 1
    return [str(Path(*own[-length:])) for own, length in zip(parts, lengths, strict=True)]


def _shape(table: MeasuredTable) -> str:
    return " x ".join(f"{size:,}" for size in table.metrics.shape)


def _cell(metric: Metric, table: MeasuredTable, notes: list[str]) -> str:
    value: float | None = getattr(table.metrics, metric.key)
    if value is not None:
        return metric.text(value)
    note = table.missing.get(metric.key, UNDEFINED)
    if note not in notes:
        notes.append(note)
    return DASH + MARKS[notes.index(note)]


def _benchmark_rows(tables: Sequence[MeasuredTable]) -> list[InspectionRow]:
    names = dict.fromkeys(name for table in tables for name in table.metrics.word_similarity)
    r_cos = METRICS["r_cos"]
    meaning = f"{r_cos.symbol} (pairs of single tokens / all pairs)"
    return [InspectionRow(name, r_cos.arrow, meaning, [_agreement(name, table) for table in tables]) for name in names]


def _agreement(name: str, table: MeasuredTable) -> str:
    result = table.metrics.word_similarity.get(name)
    if result is None:
        return DASH
    correlation = DASH if result.pearson is None else four_digits(result.pearson)
    return f"{correlation} ({result.pairs_used}/{result.pairs_total})"


def _zero_rows(tables: Sequence[MeasuredTable]) -> list[InspectionRow]:
    counts = [table.metrics.zero_rows for table in tables]
    if not any(counts):
        return []
    return [InspectionRow("zero rows", "", "embeddings of length 0", [f"{count:,}" for count in counts])]


def _quantisation_rows(tables: Sequence[MeasuredTable]) -> list[InspectionRow]:
    """Two rows for each kind of quantisation; all tables have the same kinds."""
    rows = []
    for number, way in enumerate(tables[0].quantised):
        errors = [table.quantised[number] for table in tables]
        name = f"{way.integers} per {way.scale}"
        in_table = [_before_and_after(each.table, each.table_recentred) for each in errors]
        in_logits = [_before_and_after(each.logits, each.logits_recentred) for each in errors]
        rows += [
            InspectionRow(f"{name}: table (%)", "↓", f"{TABLE_ERROR}; {RECENTRED}", in_table),
            InspectionRow(f"{name}: logits (%)", "↓", f"{LOGIT_ERROR}; {RECENTRED}", in_logits),
        ]
    return rows


def _before_and_after(before: float | None, after: float | None) -> str:
    return DASH if before is None or after is None else f"{significant(before, 3)} → {significant(after, 3)}"
