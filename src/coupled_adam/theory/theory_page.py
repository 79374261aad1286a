"""The page of one run's theory: the paper's argument step by step, with the measurements.

Requires jinja2 and matplotlib, so it is imported only to write a page.
"""

from collections.abc import Mapping
from pathlib import Path

from coupled_adam.base.captioned_figure import CaptionedFigure, write_captioned_figures
from coupled_adam.base.files import remove_leftovers, write_whole
from coupled_adam.base.page import render_template
from coupled_adam.base.text import counted, short
from coupled_adam.theory.record import RunTheory
from coupled_adam.theory.run_figures import CAPTIONS, draw_run_figures
from coupled_adam.theory.story import chapters
from coupled_adam.theory.theory_folder import TheoryFolder
from coupled_adam.theory.theory_numbers import fits_table, own_note, sums_table

TEMPLATE = Path(__file__).with_name("theory_page.html.jinja")
PAGE = "theory.html"


def write_page(run: Path, together: Mapping[str, RunTheory], name: str, facts: Mapping[str, str]) -> Path:
    """Write `theory.html` and the figures of a run; return the path of the page.

    Args:
        run: folder of the run, with the files of `theory_of_run`.
        together: the runs to show over training, by name.
        name: of this run among them.
        facts: provenance of the page, shown in this order.
    """
    folder, theory = TheoryFolder(run), together[name]
    arrays = folder.read_arrays(theory.checkpoints[-1].step)
    figures = draw_run_figures(theory, arrays, folder.read_unigram(), together)
    for each in (folder.path, folder.figures):
        remove_leftovers(each)  # from a killed process
    write_captioned_figures(list(figures.values()), folder.figures, CAPTIONS)
    write_whole(folder.path / PAGE, render_page(name, theory, figures, facts))
    return folder.path / PAGE


def render_page(name: str, theory: RunTheory, figures: Mapping[str, CaptionedFigure], facts: Mapping[str, str]) -> str:
    """Render the page as HTML."""
    return render_template(
        TEMPLATE,
        name=name,
        described=_described(theory),
        chapters=chapters(theory, figures),
        tables=[sums_table(theory), fits_table(theory)],
        own_note=own_note(theory),
        batches=counted(theory.batches, "batch", "batches"),
        notes=theory.notes,
        facts=facts,
    )


def _described(theory: RunTheory) -> list[str]:
    """Summary of the run and the measurements."""
    table = "one tied table" if theory.tied else "the output table"
    checkpoints, batches = counted(len(theory.checkpoints), "checkpoint"), counted(theory.batches, "batch", "batches")
    return [
        theory.run,
        f"{short(theory.parameters)} parameters, trained with {theory.trained_with}",
        f"{table} of {theory.rows:,} x {theory.width}",
        f"{checkpoints}, {batches} of {counted(theory.tokens_per_batch, 'token')} each",
        theory.precision,
        theory.corpus,
    ]
