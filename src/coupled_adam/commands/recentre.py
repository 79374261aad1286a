"""`coupled-adam recentre`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from coupled_adam.commands.refusal import user_errors

if TYPE_CHECKING:
    from coupled_adam.inspection.recentring.recentre_model import Recentred


def recentre(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face folder with safetensors (one file or shards), or the folder of a run.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder for the recentred model, of the same kind.", show_default=False),
    ],
    untie: Annotated[
        bool,
        typer.Option(
            "--untie",
            help="Give the head a table of its own where input and output are one table. Needed for tied models "
            "without learned positions, such as Llama; the error without it says how many bytes it costs.",
        ),
    ] = False,
    dtype: Annotated[
        Literal["float32"] | None,
        typer.Option(help="Store the changed tensors in float32, with less rounding.  [default: as they were]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="For the comparison on text, where none comes with MODEL: a tokenizer.json, a model folder or a "
            "tiktoken name.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older model in OUT.")] = False,
) -> None:
    """Remove the mean of a finished model's output embeddings. Its probabilities stay the same.

    Softmax does not see a vector that is subtracted from every row of the head. In a tied GPT-2 the vector is added to
    the positions, so that the input stays the same too.

    Before anything is written, both models are compared in float64 on random tokens and, with a tokenizer, on text. A
    difference above 1e-4 is refused. Then the files are read back and the rounding is measured. Only tensors that
    change are rewritten, and no code in the files is run. It takes 8 bytes of memory for every parameter.

    Try: `coupled-adam inspect models/mine`, then `coupled-adam recentre models/mine models/mine-centred`
    """
    from coupled_adam.base.progress import progress_bar, warnings_as_notes
    from coupled_adam.base.text import printable

    with user_errors(), warnings_as_notes(), progress_bar() as bar:
        import torch

        from coupled_adam.inspection.recentring.recentre_model import recentre as recentre_model
        from coupled_adam.inspection.recentring.recentre_model import recentred_json

        done = recentre_model(
            model,
            out,
            untie=untie,
            dtype=None if dtype is None else torch.float32,
            tokenizer=tokenizer,
            overwrite=overwrite,
            on_stage=lambda what, share: bar.show(what, share, None if share is None else 1.0),
        )
    for note in done.notes:
        typer.echo(f"Note: {printable(note)}", err=True)
    if as_json:
        typer.echo(json.dumps(recentred_json(done), allow_nan=False))
    else:
        _print(done)


def _print(done: "Recentred") -> None:
    from coupled_adam.base.text import printable, size_text
    from coupled_adam.inspection.inspection_table import compare
    from coupled_adam.inspection.terminal import print_overview

    console = Console(highlight=False)
    if done.after is None:
        print_overview(console, compare([done.before]))
        typer.echo(
            f"\nNothing left to do: the mean of the output embeddings is 0 within the rounding of {done.dtype} "
            f"(ratio {done.mu_norm_ratio:.1e}). Nothing was written."
        )
        return
    print_overview(console, compare([done.before, done.after]))
    table = Table("log-probabilities before and after", *(Column(each.tokens, justify="right") for each in done.stored))
    table.add_row("positions compared", *(f"{each.positions:,}" for each in done.stored))
    table.add_row("largest difference, unrounded float64", *(f"{each.largest:.1e}" for each in done.unrounded))
    table.add_row(f"largest difference, stored {done.dtype}", *(f"{each.largest:.1e}" for each in done.stored))
    table.add_row(f"mean KL divergence, stored {done.dtype}", *(f"{each.mean_kl:.1e}" for each in done.stored))
    console.print()
    console.print(table)
    how = {
        "head": "The mean was taken from every row of the head. The input table is as it was.",
        "positions": "The mean was taken from every row of the table and added to every position.",
        "untie": f"The head has its own table now, {size_text(done.added_bytes)} more. The input table is as it was.",
    }
    padding = f" ({done.padding_rows:,} padding rows moved too, and did not count)" if done.padding_rows else ""
    typer.echo(f"{how[done.method]}{padding}")
    typer.echo(f"Tensors rewritten: {printable(', '.join(done.tensors))}. Everything else was copied.")
    if done.dtype in ("bfloat16", "float16"):
        typer.echo("For less rounding: --dtype float32.")
    typer.echo(f"Written: {printable(str(done.out))}")
