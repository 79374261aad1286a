"""Formats of a table: CSV for programs, Markdown for pages, LaTeX for papers, Rich for the terminal."""

import csv
import io
from dataclasses import replace

import rich.console
import rich.table
import rich.text

from coupled_adam.base.notation import to_latex, to_markdown
from coupled_adam.base.text import escape_latex
from coupled_adam.report.table_model import Column, Number, ReportTable, TableCell

# Words for bold in notes, and their replacements where there is no bold.
PLAIN_WORDS = (("Bold:", "*:"), ("is bold", "has an asterisk"))
MOST_SIDE_BY_SIDE = 4


def to_csv(table: ReportTable) -> str:
    """Write the text of every column, followed by its numbers in full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([name for column in table.columns for name in _csv_names(column)])
    for row in table.rows:
        writer.writerow(
            [value for column, cell in zip(table.columns, row, strict=True) for value in _csv_values(column, cell)]
        )
    return buffer.getvalue()


def _csv_names(column: Column) -> list[str]:
    names = [column.key, *(f"{column.key}_{name}" for name in column.numbers)]
    if column.published:
        names += [f"{column.key}_published{end}" for end in ("", "_mean", "_std", "_bold")]
    return names


def _csv_values(column: Column, cell: TableCell) -> list[str]:
    values = [cell.csv_text or cell.text, *(_exact(cell.numbers.get(name)) for name in column.numbers)]
    if column.published:
        found = cell.published
        values += [found.text, _exact(found.mean), _exact(found.std), _exact(int(found.bold))] if found else [""] * 4
    return values


def _exact(number: Number) -> str:
    return "" if number is None else repr(number)


def to_markdown_table(table: ReportTable) -> str:
    """Write a heading, the table and the notes, with published values in brackets."""
    lines = [
        f"### {table.title}",
        "",
        _markdown_row([to_markdown(column.label) for column in table.columns]),
        _markdown_row(["---:" if column.numbers else ":---" for column in table.columns]),
        *(_markdown_row([_markdown_cell(cell) for cell in row]) for row in table.rows),
    ]
    if table.notes:
        lines += ["", *(f"- {to_markdown(note)}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _markdown_cell(cell: TableCell) -> str:
    shown = to_markdown(cell.text, bold=cell.bold)
    if cell.published is None:
        return shown
    return f"{shown} \\[{to_markdown(cell.published.text, bold=cell.published.bold)}\\]"


def to_latex_table(table: ReportTable) -> str:
    """Write a table in the form of the paper's: booktabs, rules between groups, grouping columns only at changes."""
    text_columns = sum(not column.numbers for column in table.columns)
    leading_text = all(not column.numbers for column in table.columns[:text_columns])
    kinds = ["r" if column.numbers else "l" for column in table.columns]
    if leading_text and 0 < text_columns < len(kinds):
        kinds.insert(text_columns, "|")
    lines = [
        r"% \usepackage{booktabs}",
        r"\begin{table*}[ht]",
        r"\centering",
        r"\scriptsize",
        rf"\begin{{tabular}}{{{''.join(kinds)}}}",
        r"\toprule",
        " & ".join(column.latex for column in table.columns) + r" \\",
        r"\midrule",
    ]
    for number, row in enumerate(table.rows):
        rule = table.rule_above(number)
        if rule is not None:
            lines.append(r"\midrule" if rule == 0 else rf"\cmidrule{{{rule + 1}-{len(row)}}}")
        # Repeat a grouping cell only below a rule that spans it.
        first_shown = 0 if number == 0 else table.groups if rule is None else rule
        cells = ["" if index < first_shown else _latex_cell(cell) for index, cell in enumerate(row)]
        lines.append(" & ".join(cells) + r" \\")
    caption = " ".join(escape_latex(sentence) for sentence in (f"{table.title}.", *table.notes))
    lines += [
        r"\bottomrule",
        r"\end{tabular}",
        rf"\caption{{{caption}}}",
        rf"\label{{tab:{table.name}}}",
        r"\end{table*}",
    ]
    return "\n".join(lines) + "\n"


def _latex_cell(cell: TableCell) -> str:
    shown = to_latex(cell.text, bold=cell.bold)
    return shown if cell.published is None else f"{shown} [{to_latex(cell.published.text, bold=cell.published.bold)}]"


def to_rich(table: ReportTable) -> rich.table.Table:
    """Make a terminal table, with published values in brackets, rules between groups, and headings of one word per line
    to save width."""
    shown = rich.table.Table(title=table.title, caption="\n".join(table.notes), caption_justify="left")
    for column in table.columns:
        if column.numbers:
            shown.add_column(column.label.replace(" ", "\n"), justify="right", no_wrap=True)
        else:
            shown.add_column(column.label)
    for number, row in enumerate(table.rows):
        if table.rule_above(number) is not None:
            shown.add_section()
        shown.add_row(*(_rich_cell(cell) for cell in row))
    return shown


def to_rich_comparison(table: ReportTable) -> rich.table.Table:
    """Make a terminal table of results: a few optimizers side by side, many as rows."""
    names = [index for index, column in enumerate(table.columns) if not column.numbers]
    # Headings are the columns that differ between rows; without a differing optimizer, also D and the optimizer.
    heads = [index for index in names if len({row[index].text for row in table.rows}) > 1]
    if not any(table.columns[index].key == "optimizer" for index in heads):
        heads = [index for index in names if index in heads or table.columns[index].key in ("D", "optimizer")]
    if len(table.rows) > MOST_SIDE_BY_SIDE:
        shown = to_rich(table.without(set(names) - set(heads)))
        shown.caption = None  # would be wrapped to the width of the table, which may be narrow
        return shown
    shown = rich.table.Table("", title=table.title)
    for row in table.rows:
        lines = [
            f"seeds: {row[index].text}" if table.columns[index].key == "seeds" else row[index].text for index in heads
        ]
        shown.add_column("\n".join(lines), justify="right", no_wrap=True)
    for index, column in enumerate(table.columns):
        if column.numbers:
            cells = [row[index] for row in table.rows]
            shown.add_row(
                column.label, *(rich.text.Text(cell.text, style="bold" if cell.bold else "") for cell in cells)
            )
    return shown


def for_console(table: ReportTable, console: rich.console.Console) -> ReportTable:
    """Adapt a table to a console: if it has no bold, as in a file or pipe, mark bold values with an asterisk."""
    if console.color_system is not None:  # otherwise Rich writes no styles
        return table
    rows = tuple(
        tuple(replace(cell, text=f"{cell.text}*", bold=False) if cell.bold else cell for cell in row)
        for row in table.rows
    )
    notes = table.notes
    for words, plain in PLAIN_WORDS:
        notes = tuple(note.replace(words, plain) for note in notes)
    return replace(table, rows=rows, notes=notes)


def _rich_cell(cell: TableCell) -> rich.text.Text:
    shown = rich.text.Text(cell.text, style="bold" if cell.bold else "")
    if cell.published is not None:
        shown.append(f" [{cell.published.text}]", style="dim")
    return shown


FORMATS = {".csv": to_csv, ".md": to_markdown_table, ".tex": to_latex_table}
"""File formats by suffix."""
