"""The page of `inspect`: the measures of all tables side by side, and the figures of each.

Requires jinja2 and matplotlib, so it is imported only to write a page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coupled_adam.base.captioned_figure import CaptionedFigure
from coupled_adam.base.page import render_template
from coupled_adam.inspection.inspection_table import compare
from coupled_adam.inspection.model_inspection import MeasuredModel
from coupled_adam.inspection.table_figures import draw_table_figures

TEMPLATE = Path(__file__).with_name("inspection_page.html.jinja")


@dataclass(frozen=True)
class PageSection:
    """The figures of one table."""

    heading: str
    figures: Sequence[CaptionedFigure]


def render_page(models: Sequence[MeasuredModel], facts: Mapping[str, str]) -> str:
    """Render the page as HTML.

    Args:
        models: measured with `Request.pictures`.
        facts: provenance of the page, shown in this order.
    """
    overview = compare(models)
    tables = [table for model in models for table in model.tables]
    sections = []
    for number, (column, table) in enumerate(zip(overview.columns, tables, strict=True)):
        assert table.sample is not None
        figures = draw_table_figures(f"table{number}", table.metrics, table.sample, table.counts)
        sections.append(PageSection(column.heading, figures))
    return render_template(TEMPLATE, overview=overview, sections=sections, facts=facts)
