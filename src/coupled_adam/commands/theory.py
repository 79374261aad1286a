"""`coupled-adam theory`."""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coupled_adam.base.progress import ProgressBar, progress_bar, wide_enough
from coupled_adam.commands.page_facts import page_facts
from coupled_adam.commands.refusal import refuse, user_errors

if TYPE_CHECKING:
    from coupled_adam.theory.record import RunTheory
    from coupled_adam.theory.theory_numbers import Numbers


def theory(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="Run folder, best with milestones; several are compared.", show_default=False
        ),
    ],
    batches: Annotated[int, typer.Option(min=1, metavar="K", help="Batches per checkpoint.")] = 20,
    checkpoint: Annotated[
        list[int] | None,
        typer.Option(
            metavar="STEP",
            min=0,
            help="Checkpoint to measure; may be repeated.  [default: all milestones, or the newest checkpoint]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Device to use: `cpu` or `cuda`.  [default: a GPU if available]"),
    ] = None,
    precision: Annotated[
        Literal["float32", "bf16"], typer.Option(help="Precision of the forward pass; sums vanish up to its rounding.")
    ] = "float32",
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write theory.html and the figures.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Repeat finished measurements.")] = False,
) -> None:
    """Measure why embeddings shift, on the checkpoints of a run.

    Sums gradients and updates over the vocabulary: a sum of zero does not move the mean embedding. Compares the updates
    of SGD, Adam, Coupled Adam and the run's own optimizer, separately for the input and the output layer. Also shows
    how the second moment depends on the unigram probability. The paper's values are next to the measured ones. The run
    is not trained further.

    Writes theory.html, the figures and all numbers to RUN/theory. Finished measurements are not repeated.

    Try: `coupled-adam train tiny --set checkpoints.milestones=10 --out runs/milestones`, then
    `coupled-adam theory runs/milestones`
    """
    started = time.perf_counter()

    from coupled_adam.base.page import require_page_packages
    from coupled_adam.base.text import printable
    from coupled_adam.inspection.inspection_table import short_names
    from coupled_adam.theory.measure import theory_of_run

    if page:
        with user_errors():
            require_page_packages("for theory.html (or pass --no-page)")
    names = short_names([printable(str(run)) for run in runs])
    if len({run.resolve() for run in runs}) < len(runs):
        refuse("the same run is listed twice; pass each run once")
    measured: dict[str, RunTheory] = {}
    with user_errors():
        for name, run in zip(names, runs, strict=True):
            with progress_bar() as bar:
                bar.show(name, None, note="loading")
                measured[name] = theory_of_run(
                    run,
                    checkpoints=checkpoint,
                    batches=batches,
                    device=device,
                    precision=precision,
                    on_progress=partial(_show_progress, bar, name),
                    fresh=fresh,
                )
    if as_json:
        typer.echo(json.dumps({name: json.loads(found.to_json()) for name, found in measured.items()}))
    else:
        _print_tables(Console(highlight=False), measured)
    if page:
        _write_pages(runs, measured, time.perf_counter() - started, is_quiet=as_json)
    if checkpoint is None and precision == "float32":  # as a study measures it
        _tell_studies(runs, measured, is_quiet=as_json)


def _show_progress(bar: ProgressBar, name: str, done: int, total: int, step: int) -> None:
    bar.show(name, done, total, note=f"step {step:,}")


def _print_tables(console: Console, measured: "dict[str, RunTheory]") -> None:
    from coupled_adam.base.text import counted, printable
    from coupled_adam.theory.story import findings
    from coupled_adam.theory.theory_numbers import LEGEND, fits_table, own_note, sums_table

    for name, run in measured.items():
        batches, checkpoints = counted(run.batches, "batch", "batches"), counted(len(run.checkpoints), "checkpoint")
        console.print(Text(f"{name}: {batches} at each of {checkpoints}"), soft_wrap=True)
        for numbers in (sums_table(run), fits_table(run)):
            table = _rich_table(numbers)
            wide_enough(console, table).print(table)
        console.print(Text(f"{own_note(run)} {LEGEND}".lstrip(), style="dim"), soft_wrap=True)
        for sentence in findings(run):
            console.print(Text(sentence), soft_wrap=True)
        for note in run.notes:
            console.print(Text(f"Note: {printable(note)}", style="dim"), soft_wrap=True)


def _rich_table(numbers: "Numbers") -> Table:
    """Make a rich table with the name of each group above its first column."""
    headings = [
        f"{group if place == 0 or group != numbers.groups[place - 1] else ''}\n{label}"
        for place, (group, label) in enumerate(zip(numbers.groups, numbers.labels, strict=True))
    ]
    columns = [Column(Text(heading), justify="right", no_wrap=True) for heading in headings]
    table = Table(*columns, title=numbers.title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    for row in numbers.rows:
        table.add_row(*row)
    for row in numbers.below:
        table.add_row(*row, style="bold" if row[0] == "mean" else "dim")
    return table


def _write_pages(runs: Sequence[Path], measured: "dict[str, RunTheory]", seconds: float, *, is_quiet: bool) -> None:
    from coupled_adam.base.text import printable
    from coupled_adam.theory.theory_page import write_page

    facts = page_facts(seconds)
    for name, run in zip(measured, runs, strict=True):
        with user_errors():
            path = write_page(run, measured, name, facts)
        typer.echo(f"Page: {printable(str(path))}", err=is_quiet)


def _tell_studies(runs: Sequence[Path], measured: "dict[str, RunTheory]", *, is_quiet: bool) -> None:
    """Add the measurements to the results of the studies that the runs belong to."""
    from coupled_adam.base.text import printable
    from coupled_adam.study.results import add_metrics
    from coupled_adam.study.theory_metrics import theory_metrics

    with user_errors():
        studies = [add_metrics(run, theory_metrics(found)) for run, found in zip(runs, measured.values(), strict=True)]
    for study in dict.fromkeys(studies):
        if study is not None:
            typer.echo(f"Added to the results of the study: {printable(str(study))}", err=is_quiet)
