"""`coupled-adam demo`."""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from coupled_adam.commands.refusal import refuse

if TYPE_CHECKING:
    from coupled_adam.demo.comparison import Outcome, Settings
    from coupled_adam.demo.text import Corpus


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each of the two models.")] = 300,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Decides the initial weights and the batches of both.")
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder for report.html, made if it is missing."),
    ] = Path("demo"),
) -> None:
    """Train one small model twice, with AdamW and with CoupledAdamW, and compare.

    Takes about a minute on two CPU cores and downloads nothing: the text is the documentation of Python's standard
    library. Both trainings start from the same weights and see the same batches.

    Look at the **mean-embedding ratio**: the length of the mean embedding over the mean length of the embeddings.
    It is 0 when they are centred at the origin, and near 1 when they all point the same way.

    A quick look: `coupled-adam demo --steps 50`. Is it the seed? `coupled-adam demo --seed 1 --out demo-1`
    """
    started = time.perf_counter()

    from coupled_adam.atomic import require_writable, write_whole
    from coupled_adam.demo.comparison import Settings
    from coupled_adam.demo.report import render_report, report_facts
    from coupled_adam.demo.text import standard_library_corpus

    console = Console(highlight=False)
    settings = Settings(steps=steps, seed=seed)
    report = out / "report.html"
    try:
        require_writable(report)  # now, not after the training
    except OSError as error:
        _refuse_out(report, error)
    try:
        corpus = standard_library_corpus(settings.vocabulary_size)
    except ValueError as error:
        refuse(str(error))

    outcomes = _train_both(console, corpus, settings)
    _print_outcomes(console, *outcomes)
    command = shlex.join(["coupled-adam", "demo", f"--steps={steps}", f"--seed={seed}", f"--out={out}"])
    facts = report_facts(corpus, settings, command, time.perf_counter() - started)
    try:
        write_whole(report, render_report(*outcomes, facts))
    except OSError as error:
        _refuse_out(report, error)
    console.print(f"Report: {report}", markup=False, soft_wrap=True)


def _train_both(console: Console, corpus: "Corpus", settings: "Settings") -> "tuple[Outcome, Outcome]":
    from coupled_adam.demo.comparison import compare

    console.print(
        f"Text: the documentation of Python's standard library, {len(corpus.train):,} tokens to train on, "
        f"{len(corpus.validation):,} to validate on."
    )
    progress = Progress(
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("time left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        bar = progress.add_task("", total=2 * settings.steps)

        def on_step(optimizer: str, step: int, loss: float) -> None:
            progress.update(bar, description=optimizer, advance=1)
            if step == settings.steps:
                console.print(f"{optimizer}: {step} steps, loss of the last batch {loss:.3f}")

        return compare(corpus, settings, on_step)


def _print_outcomes(console: Console, adamw: "Outcome", coupled: "Outcome") -> None:
    from coupled_adam.demo.summary import summary_rows, verdict

    table = Table("after training")
    for outcome in (adamw, coupled):
        table.add_column(outcome.name, justify="right")
    for row in summary_rows(adamw, coupled):
        table.add_row(*row)
    console.print(table)
    console.print(verdict(adamw, coupled))


def _refuse_out(report: Path, error: OSError) -> NoReturn:
    refuse(f"cannot write {str(report)!r} ({error.strerror}); give a folder that can be written with --out")
