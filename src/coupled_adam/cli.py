"""The command `coupled-adam`: parses, calls, prints. torch is imported by the commands that need it."""

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from coupled_adam import __version__

if TYPE_CHECKING:
    from coupled_adam.demo.comparison import Outcome, Settings
    from coupled_adam.demo.text import Corpus

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of `coupled-adam`."""
    # Two OpenMP threads that spin while waiting can be 20 times slower beside one other busy process. OpenMP reads
    # this once, when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coupled-adam {__version__}")
        raise typer.Exit


@app.callback()
def coupled_adam(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Better embeddings with Coupled Adam.

    Adam pushes the embeddings of a language model away from the origin, all in one common direction. CoupledAdamW
    is AdamW with one second moment for the whole vocabulary: the embeddings stay centred, and their optimizer
    state is half as large.

    Start with `coupled-adam demo`. In your own training: `from coupled_adam import CoupledAdamW`.
    """


@app.command()
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
        _refuse(str(error))

    outcomes = _train_both(console, corpus, settings)
    _print_outcomes(console, *outcomes)
    command = shlex.join(["coupled-adam", "demo", f"--steps={steps}", f"--seed={seed}", f"--out={out}"])
    facts = report_facts(corpus, settings, command, time.perf_counter() - started)
    try:
        write_whole(report, render_report(*outcomes, facts))
    except OSError as error:
        _refuse_out(report, error)
    console.print(f"Report: {report}", markup=False, soft_wrap=True)


@app.command()
def inspect(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="A file (.safetensors, .npy, .npz, .gguf, .pt, .pth, .bin, .ckpt), a folder (a Hugging Face model, a "
            "run or a checkpoint of ours), or the name of a model on the Hugging Face hub.",
            show_default=False,
        ),
    ],
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure this tensor only; the end of its name is enough.")
    ] = None,
    unigram: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token counts (.npy), or tokens to count (.bin, .u16.xz).")
    ] = None,
    wordsim: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of word pairs with human scores; `download` fetches them once."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="A tokenizer.json, a model folder, a GGUF file or a tiktoken name."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Also write a page with pictures, one file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute: `cpu`, `cuda`, `cuda:1`.")] = None,
) -> None:
    """Measure the embeddings of finished models, side by side.

    Finds the input and the output table, says whether they are tied, and reads nothing else. Files are read without
    running any code in them.

    Look at the **mean-embedding ratio**: 0 when the embeddings are centred at the origin, near 1 when they all point
    the same way.

    Try: `coupled-adam inspect model.safetensors`, `coupled-adam inspect runs/adamw runs/coupled --html compare.html`
    """
    started = time.perf_counter()

    from coupled_adam.atomic import require_writable, write_whole
    from coupled_adam.inspection.measuring import Request, inspect_models, json_object
    from coupled_adam.inspection.overview import compare, printable
    from coupled_adam.inspection.terminal import measuring_bar, print_overview

    if html is not None:
        try:
            from coupled_adam.inspection.page import page_facts, render_page
        except ModuleNotFoundError as error:
            _refuse(f"--html needs the package {error.name}: pip install 'coupled-adam[study]'")
        try:
            require_writable(html)  # now, not after the measuring
        except OSError as error:
            _refuse_page(html, error)
    request = Request(tensor, unigram, wordsim, tokenizer, device, pictures=html is not None)
    try:
        with measuring_bar() as on_progress:
            models = inspect_models(paths, request, on_progress)
    except (ValueError, OSError, ImportError) as error:
        _refuse(printable(str(error)))

    if as_json:
        typer.echo(json.dumps(json_object(models), allow_nan=False))
    else:
        print_overview(Console(highlight=False), compare(models))
    if html is not None:
        facts = page_facts(printable(shlex.join(["coupled-adam", *sys.argv[1:]])), time.perf_counter() - started)
        try:
            write_whole(html, render_page(models, facts))
        except OSError as error:
            _refuse_page(html, error)
        typer.echo(f"Page: {html}", err=as_json)


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
    _refuse(f"cannot write {str(report)!r} ({error.strerror}); give a folder that can be written with --out")


def _refuse_page(page: Path, error: OSError) -> NoReturn:
    _refuse(f"cannot write {str(page)!r} ({error.strerror}); give another file with --html")


def _refuse(message: str) -> NoReturn:
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)
