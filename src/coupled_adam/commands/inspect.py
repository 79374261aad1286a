"""`coupled-adam inspect`."""

import json
import time
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from coupled_adam.commands.page_facts import page_facts
from coupled_adam.commands.refusal import refuse, user_errors


def inspect(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="File (.safetensors, .npy, .npz, .gguf, .pt, .pth, .bin, .ckpt), folder (Hugging Face model, run or "
            "checkpoint), or the name of a model on the Hugging Face hub, such as `gpt2`.",
            show_default=False,
        ),
    ],
    tensor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Measure only this tensor; the end of its name is enough.")
    ] = None,
    unigram: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Token counts for rho: counts (.npy), or tokens to count (.bin, .u16.xz, or a folder)."
        ),
    ] = None,
    wordsim: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Word pairs with human scores for r_cos: a folder, or `download` to fetch and cache them.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Tokenizer for --wordsim, if PATH has none: a tokenizer.json, a model folder, a GGUF file or a "
            "tiktoken name.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="OUT.html", help="Also write a self-contained HTML page with figures.")
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            metavar="TYPES",
            help="Also quantise the tables and show the error before and after recentring: `int8`, `int4` or "
            "`int8,int4`.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device to use: `cpu`, `cuda`, `cuda:1`.  [default: cpu]")
    ] = None,
) -> None:
    """Measure the embeddings of trained models, side by side.

    The first number to read is the **mean-embedding ratio**: 0 if the embeddings are centred at the origin, near 1 if
    they all point the same way.

    Reads only the input and output tables, and detects whether they are tied. No code in the files is run.

    Try: `coupled-adam inspect model.safetensors`, `coupled-adam inspect runs/adamw runs/coupled --html compare.html`
    """
    started = time.perf_counter()

    from coupled_adam.base.files import require_writable, write_whole
    from coupled_adam.base.page import require_page_packages
    from coupled_adam.base.progress import progress_bar, warnings_as_notes
    from coupled_adam.inspection.inspection_table import compare
    from coupled_adam.inspection.model_inspection import Request, inspect_models, json_object
    from coupled_adam.inspection.quantising import parse_integers
    from coupled_adam.inspection.terminal import print_overview

    if html is not None:
        with user_errors():
            require_page_packages("for --html")
        from coupled_adam.inspection.inspection_page import render_page

        try:
            require_writable(html)  # fail before measuring, not after
        except OSError as error:
            _refuse_page(html, error)
    with user_errors():
        kinds = [] if quantise is None else parse_integers(quantise)
    request = Request(tensor, unigram, wordsim, tokenizer, device, pictures=html is not None, quantise=kinds)
    with user_errors(), warnings_as_notes(), progress_bar() as bar:
        models = inspect_models(paths, request, lambda what, done: bar.show("measuring", done, note=what))

    if as_json:
        typer.echo(json.dumps(json_object(models), allow_nan=False))
    else:
        print_overview(Console(highlight=False), compare(models))
    if html is not None:
        facts = page_facts(time.perf_counter() - started)
        try:
            write_whole(html, render_page(models, facts))
        except OSError as error:
            _refuse_page(html, error)
        typer.echo(f"Page: {html}", err=as_json)


def _refuse_page(page: Path, error: OSError) -> NoReturn:
    refuse(f"cannot write {str(page)!r} ({error.strerror}); pass another file with --html")
