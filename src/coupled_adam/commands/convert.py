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
# What torch.optim.AdamW is given for --adamw-groups; the others take a few lines.
ADAMW_PARAMETERS = {"single": "model.parameters()", "tables": "param_groups(model, couple='none')"}


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Checkpoint folder of the Hugging Face Trainer or accelerate, or a PyTorch file with an optimizer.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Folder or file to write, the same kind as CHECKPOINT.", show_default=False),
    ],
    to: Annotated[Literal["coupled", "adamw"], typer.Option(help="Optimizer that will load OUT.", show_default=False)],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model, if CHECKPOINT has no config.json: a folder with config.json, a file with the model's state "
            "dict, or `module:function`, a Python function that returns the model.",
        ),
    ] = None,
    couple: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLES",
            help="Tables to couple: `output`, `input`, `all`, or a name pattern; may be repeated.  [default: output]",
        ),
    ] = None,
    adamw_groups: Annotated[
        Literal["trainer", "single", "matrices", "tables"] | None,
        typer.Option(
            metavar="GROUPS",
            help="AdamW's parameter groups: `trainer` (Hugging Face Trainer), `single` (one group), `matrices` "
            "(matrices, then vectors, as in nanoGPT) or `tables` (`param_groups`).  [default: from AdamW, whichever "
            "fits the file; to AdamW, `trainer` for a Trainer checkpoint, otherwise `single`]",
        ),
    ] = None,
    frozen: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Name pattern of parameters that were not trained; may be repeated."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing OUT.")] = False,
) -> None:
    """Convert a checkpoint between AdamW and CoupledAdamW, to switch in the middle of a run.

    Averages the second moments of vocabulary tables over the vocabulary (`--to coupled`), or repeats them for every row
    (`--to adamw`). Keeps everything else, including the learning-rate schedule. No code in the files is run.

    Prints how to resume from OUT.

    Try: `coupled-adam convert adamw/checkpoint-500 coupled/checkpoint-500 --to coupled`
    """
    from coupled_adam.base.text import printable
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
    _print_summary(conversion, to)
    typer.echo(f"Written: {printable(str(out))}. To resume from it:\n")
    for line in _next_lines(conversion, out, to, chosen, adamw_groups):
        typer.echo(f"    {line}")
    if to == "coupled":
        typer.echo("\nPass CoupledAdamW your own row_exponent, mean_free and options, if any.", nl=False)
        sets = " The file sets lr and betas of all groups; a warning says if it replaces those of the tables."
        typer.echo(sets if conversion.has_modules else "")


def _print_summary(conversion: "Conversion", to: str) -> None:
    from coupled_adam.base.progress import wide_enough
    from coupled_adam.base.text import printable, setting, size_text

    verb = "averaged" if to == "coupled" else "filled"
    tables = Table("table", *_numbers(f"rows {verb}", "state before", "state after"))
    for row in conversion.tables:
        V, _ = row.shape
        tables.add_row(Text(printable(row.name)), f"{V:,}", size_text(row.bytes_before), size_text(row.bytes_after))
    tables.add_section()
    tables.add_row("all parameters", "", size_text(conversion.bytes_before), size_text(conversion.bytes_after))
    groups = Table("group", *_numbers("tensors", "learning rate", "weight decay"))
    for index, group in enumerate(conversion.groups):
        numbers = f"{len(group['params']):,}", setting(float(group["lr"])), setting(float(group["weight_decay"]))
        groups.add_row(Text(printable(str(group.get("name", index)))), *numbers)
    console = Console(highlight=False)
    for table in (tables, groups):
        wide_enough(console, table).print(table)
    if to == "coupled" and not conversion.has_modules:
        typer.echo(
            "These are the file's parameter groups. CoupledAdamW(model) makes different ones: it loads the state by "
            "name and keeps its own learning rates and weight decay. Pass --model to convert to its groups."
        )
    elif conversion.schedulers:
        typer.echo("The learning-rate schedule is unchanged.")


def _numbers(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _next_lines(
    conversion: "Conversion", out: Path, to: str, couple: str | list[str] | None, adamw_groups: str | None
) -> list[str]:
    chosen = {} if couple in (None, "output") else {"couple": couple}
    if conversion.is_trainer_checkpoint:
        arguments = "".join(f", {key!r}: {value!r}" for key, value in chosen.items())
        by_class = f"optimizer_cls_and_kwargs=(CoupledAdamW, {{'model': model{arguments}}})" if to == "coupled" else ""
        trainer = f"trainer = Trainer(model, arguments, ...{', ' if by_class else ''}{by_class})"
        return [trainer, f"trainer.train(resume_from_checkpoint={str(out)!r})"]
    arguments = "".join(f", {key}={value!r}" for key, value in chosen.items())
    if to == "coupled":
        optimizer = f"optimizer = CoupledAdamW(model{arguments})"
    else:
        optimizer = f"optimizer = torch.optim.AdamW({ADAMW_PARAMETERS.get(adamw_groups or 'single', '...')})"
    if out.is_dir():
        return [optimizer, f"accelerator.load_state({str(out)!r})  # after accelerator.prepare(model, optimizer, ...)"]
    place = "".join(f"[{key!r}]" for key in conversion.optimizer_keys)
    return [optimizer, f"optimizer.load_state_dict(torch.load({str(out)!r}){place})"]
