"""`coupled-adam export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from coupled_adam.commands.refusal import user_errors

if TYPE_CHECKING:
    from coupled_adam.evaluation.run_export import Exported


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, as written by `train`.", show_default=False)],
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder to write the model to, created if missing.", show_default=False),
    ],
    checkpoint: Annotated[
        int | None,
        typer.Option(metavar="STEP", min=0, help="Checkpoint to export.  [default: the newest complete one]"),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Data type of the stored weights.")] = "float32",
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="A tokenizer.json or `gpt2`, used if the run's corpus is missing."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing exported model in DIR.")] = False,
) -> None:
    """Write the model of a run as a Hugging Face folder.

    GPT-2 becomes a GPT2LMHeadModel and the Llama-style model a StableLmForCausalLM, with the same logits. The folder
    loads in transformers, lm-eval and `coupled-adam inspect`. Writing it needs none of them.

    Try: `coupled-adam export runs/tiny-coupled-seed1 models/tiny`
    """
    from coupled_adam.evaluation.run_export import export_run

    with user_errors():
        exported = export_run(
            run,
            folder,
            checkpoint=checkpoint,
            dtype=dtype,
            tokenizer=tokenizer,
            overwrite=overwrite,
            on_skip=_note,
        )
    _print_summary(exported, folder, dtype)


def _print_summary(exported: "Exported", folder: Path, dtype: str) -> None:
    from coupled_adam.base.text import printable
    from coupled_adam.models.model_config import parameter_count

    parameters = parameter_count(exported.model)
    typer.echo(f"Exported {exported.name}, step {exported.step:,}: {parameters:,} parameters in {dtype}.")
    loaders = {"model": "AutoModelForCausalLM"}
    if exported.no_tokenizer is None:
        loaders["tokenizer"] = "AutoTokenizer"
    else:
        _note(
            f"no tokenizer files ({exported.no_tokenizer}); to add them, export again with --overwrite --tokenizer "
            "FILE, where FILE is a tokenizer.json or gpt2"
        )
    typer.echo(f"Folder: {printable(str(folder))}. To load it:\n")
    typer.echo(f"    from transformers import {', '.join(loaders.values())}")
    for name, loader in loaders.items():
        typer.echo(f"    {name} = {loader}.from_pretrained({str(folder)!r})")


def _note(sentence: str) -> None:
    from coupled_adam.base.text import printable

    typer.echo(f"Note: {printable(sentence)}", err=True)
