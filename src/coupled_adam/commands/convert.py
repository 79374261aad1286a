"""`coupled-adam convert`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from coupled_adam.commands.refusal import user_errors

if TYPE_CHECKING:
    from coupled_adam.conversion import Conversion

ROLES = ("output", "input", "all")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint folder of the Hugging Face Trainer or accelerate, or a PyTorch file with an optimizer.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT", help="Folder or file to write; of the same sort as CHECKPOINT.", show_default=False
        ),
    ],
    to: Annotated[
        Literal["coupled", "adamw"], typer.Option(help="The optimizer that will load OUT.", show_default=False)
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model, where CHECKPOINT has no config.json: a folder that has one, a file of its state dict, or "
            "`module:function`, a Python function of yours that returns it.",
        ),
    ] = None,
    couple: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLES", help="`output` (default), `input`, `all`, or name patterns of tables; may be repeated."
        ),
    ] = None,
    adamw_groups: Annotated[
        Literal["trainer", "single", "matrices", "tables"] | None,
        typer.Option(
            help="How AdamW's groups are cut: as the Trainer does, one group, matrices and vectors, or as "
            "`param_groups` does. Default: what fits the file; for a new AdamW file `trainer` in a Trainer "
            "checkpoint, else `single`.",
        ),
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Parameters that were not trained, by name pattern; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older OUT.")] = False,
) -> None:
    """Switch a training run between AdamW and CoupledAdamW.

    Second moments of vocabulary tables are averaged over the vocabulary (`--to coupled`) or repeated for every row
    (`--to adamw`); everything else stays as it is, the learning-rate schedule included. Files are read without running
    any code in them.

    Try: `coupled-adam convert adamw/checkpoint-500 coupled/checkpoint-500 --to coupled`, then resume from the new
    folder with CoupledAdamW.
    """
    from coupled_adam.conversion import convert_checkpoint

    chosen = None if not couple else couple[0] if len(couple) == 1 and couple[0] in ROLES else couple
    with user_errors():
        conversion = convert_checkpoint(
            source,
            out,
            to,
            model=model,
            couple=chosen,
            adamw_groups=adamw_groups,
            frozen=frozen or (),
            overwrite=overwrite,
        )
    _print_summary(conversion, out, to, chosen)


def _print_summary(conversion: "Conversion", out: Path, to: str, couple: str | list[str] | None) -> None:
    from rich.filesize import decimal

    from coupled_adam.base.progress import wide_enough
    from coupled_adam.base.text import printable

    verb = "averaged" if to == "coupled" else "filled"
    tables = Table("table", *_numbers(f"rows {verb}", "state before", "state after"))
    for row in conversion.tables:
        V, _ = row.shape
        tables.add_row(Text(printable(row.name)), f"{V:,}", decimal(row.bytes_before), decimal(row.bytes_after))
    tables.add_section()
    tables.add_row("all parameters", "", decimal(conversion.bytes_before), decimal(conversion.bytes_after))
    groups = Table("group", *_numbers("tensors", "learning rate", "weight decay"))
    for index, group in enumerate(conversion.groups):
        numbers = f"{len(group['params']):,}", f"{float(group['lr']):g}", f"{float(group['weight_decay']):g}"
        groups.add_row(Text(printable(str(group.get("name", index)))), *numbers)
    console = Console(highlight=False)
    for table in (tables, groups):
        wide_enough(console, table).print(table)
    if to == "coupled" and not conversion.has_modules:
        typer.echo(
            "These are the groups of the file. CoupledAdamW(model) has others: it loads them by name and keeps its "
            "own learning rates and weight decay. Convert with --model to get its groups."
        )
    elif conversion.schedulers:
        typer.echo("The learning-rate schedule goes on where it was.")
    typer.echo(f"Written: {printable(str(out))}. To go on from it:\n")
    for line in _next_lines(conversion, out, to, couple):
        typer.echo(f"    {line}")


def _numbers(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _next_lines(conversion: "Conversion", out: Path, to: str, couple: str | list[str] | None) -> list[str]:
    chosen = {} if couple in (None, "output") else {"couple": couple}
    if conversion.is_trainer_checkpoint:
        arguments = "".join(f", {key!r}: {value!r}" for key, value in chosen.items())
        by_class = f"optimizer_cls_and_kwargs=(CoupledAdamW, {{'model': model{arguments}}})" if to == "coupled" else ""
        trainer = f"trainer = Trainer(model, arguments, ...{', ' if by_class else ''}{by_class})"
        return [trainer, f"trainer.train(resume_from_checkpoint={str(out)!r})"]
    arguments = "".join(f", {key}={value!r}" for key, value in chosen.items())
    optimizer = f"CoupledAdamW(model{arguments})" if to == "coupled" else "torch.optim.AdamW(...)"
    return [f"optimizer = {optimizer}", f"optimizer.load_state_dict(...)  # the optimizer in {str(out)!r}"]
