"""The page: one HTML file without scripts and without anything to load, for a desk or a phone, light or dark.

Everything that comes from files is text: the template escapes it. Only the pictures go in as they are. Needs jinja2 and
matplotlib, so it is imported only when a page is wanted.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import torch
from markupsafe import Markup

from coupled_adam import __version__
from coupled_adam.inspection.inspection_table import compare
from coupled_adam.inspection.model_inspection import MeasuredModel
from coupled_adam.inspection.table_figures import Picture, draw_pictures

TEMPLATE = Path(__file__).with_name("inspection_page.html.jinja")


@dataclass(frozen=True)
class Section:
    """The pictures of one table."""

    heading: str
    pictures: Sequence[Picture]


def render_page(models: Sequence[MeasuredModel], facts: Mapping[str, str]) -> str:
    """The page as HTML text.

    Args:
        models: measured with `Request.pictures`.
        facts: how the page was made, shown in this order.
    """
    overview = compare(models)
    tables = [table for model in models for table in model.tables]
    sections = []
    for number, (column, table) in enumerate(zip(overview.columns, tables, strict=True)):
        assert table.sample is not None
        pictures = draw_pictures(f"table{number}", table.metrics, table.sample, table.counts)
        sections.append(Section(column.heading, pictures))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["unescaped"] = Markup
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(overview=overview, sections=sections, facts=facts)


def page_facts(command: str, seconds: float) -> dict[str, str]:
    """How the page was made: what it takes to make it again."""
    return {
        "command": command,
        "date": datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        "took": f"{seconds:.1f} s",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": f"coupled-adam {__version__}, torch {torch.__version__}",
    }
