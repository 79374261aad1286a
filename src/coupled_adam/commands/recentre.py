"""`coupled-adam recentre`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table

from coupled_adam.base.text import counted
from coupled_adam.commands.refusal import user_errors

if TYPE_CHECKING:
    from coupled_adam.inspection.recentring.recentre_model import Recentred


def recentre(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face folder with safetensors (one file or shards), or a run folder.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder to write the recentred model to, the same kind as MODEL.", show_default=False
        ),
    ],
    untie: Annotated[
        bool,
        typer.Option(
            "--untie",
            help="Give the head its own table if input and output share one. Required for tied models without learned "
            "positions, such as Llama. The model gets larger.",
        ),
    ] = False,
    dtype: Annotated[
        Literal["float32"] | None,
        typer.Option(help="Data type of the changed tensors; float32 rounds less.  [default: unchanged]"),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Tokenizer for the comparison on text, if MODEL has none: a tokenizer.json, a model folder or a "
            "tiktoken name.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model in OUT.")] = False,
) -> None:
    """Remove the mean of a trained model's output embeddings without changing its probabilities.

    Subtracting one vector from every row of the head does not change the softmax. In a tied GPT-2, the vector is added
    to the position embeddings, so the input does not change either.

    Before writing, compares both models in float64 on random tokens and, with a tokenizer, on text; a difference above
    1e-4 is an error. After writing, reads the files back and measures the rounding. Only changed tensors are rewritten,
    and no code in the files is run. Needs 8 bytes of memory per parameter.

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
    from coupled_adam.base.text import printable, scientific, size_text
    from coupled_adam.inspection.inspection_table import compare
    from coupled_adam.inspection.terminal import print_overview

    console = Console(highlight=False)
    if done.after is None:
        print_overview(console, compare([done.before]))
        typer.echo(
            f"\nNothing to do: the mean of the output embeddings is already 0 within the rounding of {done.dtype} "
            f"(ratio {scientific(done.mu_norm_ratio)}). Nothing was written."
        )
        return
    print_overview(console, compare([done.before, done.after]))
    table = Table("log-probabilities before and after", *(Column(each.tokens, justify="right") for each in done.stored))
    table.add_row("positions compared", *(f"{each.positions:,}" for each in done.stored))
    table.add_row("largest difference, unrounded float64", *(scientific(each.largest) for each in done.unrounded))
    table.add_row(f"largest difference, stored {done.dtype}", *(scientific(each.largest) for each in done.stored))
    table.add_row(f"mean KL divergence, stored {done.dtype}", *(scientific(each.mean_kl) for each in done.stored))
    console.print()
    console.print(table)
    how = {
        "head": "The mean was subtracted from every row of the head. The input table is unchanged.",
        "positions": "The mean was subtracted from every row of the table and added to every position.",
        "untie": f"The head now has its own table ({size_text(done.added_bytes)} more). The input table is unchanged.",
    }
    rows = counted(done.padding_rows, "padding row was", "padding rows were")
    padding = f" ({rows} moved but not counted)" if done.padding_rows else ""
    typer.echo(f"{how[done.method]}{padding}")
    typer.echo(f"Tensors rewritten: {printable(', '.join(done.tensors))}. Everything else was copied.")
    if done.dtype in ("bfloat16", "float16"):
        typer.echo("For less rounding: --dtype float32.")
    typer.echo(f"Written: {printable(str(done.out))}")
