"""A table as data, from which every format (CSV, Markdown, LaTeX, terminal, HTML) is made."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from coupled_adam.base.notation import MISSING
from coupled_adam.base.text import escape_latex
from coupled_adam.report.published import Published
from coupled_adam.report.significance import Summary, is_number

Number = float | int | None


@dataclass(frozen=True)
class Column:
    """One column."""

    key: str
    """Name in the CSV file."""
    label: str
    """Heading in plain text, including the arrow."""
    latex: str
    """Heading in LaTeX, including the arrow."""
    numbers: tuple[str, ...] = ()
    """Names of the numbers in its cells, each a column of the CSV file: KEY_mean, KEY_std. Empty for text."""
    published: bool = False
    """Whether a cell has a published value."""


@dataclass(frozen=True)
class TableCell:
    """One cell."""

    text: str
    """As shown: a name, a shorthand such as 0.123(4), or a dash if missing."""
    numbers: Mapping[str, Number] = field(default_factory=dict)
    """The same in full precision, by the names in `Column.numbers`."""
    bold: bool = False
    """Whether it is significantly better than the others."""
    published: Published | None = None
    """The paper's value."""
    note: str = ""
    """Anything unusual, such as a missing seed."""
    csv_text: str = ""
    """As written to the CSV file, which keeps its form over versions; defaults to the text."""

    @property
    def missing(self) -> bool:
        """Whether there is nothing to show."""
        return self.text == MISSING


@dataclass(frozen=True)
class ReportTable:
    """One table."""

    name: str
    """Name of the files, without suffix."""
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableCell, ...], ...]
    notes: tuple[str, ...] = ()
    """Notes for the reader, one sentence each."""
    groups: int = 0
    """Number of leading columns that group the rows: a rule is drawn where one of them changes."""

    def __post_init__(self) -> None:
        wrong = [len(row) for row in self.rows if len(row) != len(self.columns)]
        assert not wrong, f"table {self.name}: rows of {wrong} cells for {len(self.columns)} columns"

    def rule_above(self, row: int) -> int | None:
        """The first grouping column that changes between the previous row and this one; None for no rule."""
        if row == 0:
            return None
        pairs = zip(self.rows[row - 1][: self.groups], self.rows[row][: self.groups], strict=True)
        return next((index for index, (above, here) in enumerate(pairs) if above.text != here.text), None)

    def without(self, places: Collection[int]) -> "ReportTable":
        """The table without some of its columns."""
        kept = [place for place in range(len(self.columns)) if place not in places]
        return replace(
            self,
            columns=tuple(self.columns[place] for place in kept),
            rows=tuple(tuple(row[place] for place in kept) for row in self.rows),
            groups=sum(place < self.groups for place in kept),
        )


def text_column(key: str, label: str, latex: str | None = None) -> Column:
    """A column of names."""
    return Column(key, label, escape_latex(label) if latex is None else latex)


def number_column(key: str, label: str, latex: str | None = None) -> Column:
    """A column of single numbers."""
    return Column(key, label, escape_latex(label) if latex is None else latex, numbers=("value",))


def mean_column(key: str, label: str, latex: str | None = None) -> Column:
    """A column of means over seeds."""
    return Column(key, label, escape_latex(label) if latex is None else latex, numbers=("mean", "std", "seeds"))


def number_cell(
    value: float | None, text: Callable[[float], str], csv_text: Callable[[float], str] | None = None
) -> TableCell:
    """A single number, or a dash if it is missing or not finite.

    Args:
        value: the number.
        text: formats it for readers.
        csv_text: formats it for the CSV file; as `text` by default.
    """
    if not is_number(value):
        return TableCell(MISSING, {"value": value})
    return TableCell(text(value), {"value": value}, csv_text="" if csv_text is None else csv_text(value))


def mean_cell(summary: Summary, text: Callable[[float, float | None], str]) -> TableCell:
    """A mean over seeds, or a dash if no seed has a value; `text` formats mean and standard deviation."""
    numbers = {"mean": summary.mean, "std": summary.std, "seeds": summary.count}
    return TableCell(MISSING if summary.mean is None else text(summary.mean, summary.std), numbers)
